"""With `checks: full`, nodes probe each other before ranks start on them."""

from __future__ import annotations

import msgspec
from tests.control.test_machine import Run, gone, joined, left, stopped
from tests.control.test_node_checks import checked, reported

from holdfast.control.commands import ReplaceNode, Send, StartAttempt, StartProbe
from holdfast.control.machine import Machine
from holdfast.control.state import ProbePhase
from holdfast.errors import ExitCode
from holdfast.events import NodeProbed, StandbyReady, TimerExpired
from holdfast.events.probe_results import ProbeOutcome, ProbeResult, ProbeStage, ProbeSuspect
from holdfast.job.spec import CheckLevel, Checks, Job
from holdfast.protocol.orders import StopProbe

DEADLINE_S = 60.0


def probed_run(**more: int) -> Run:
    run = Run(**more)
    checks = Checks(before_start=CheckLevel.FULL, deadline_s=DEADLINE_S)
    run.job = Job.model_validate(run.job.model_dump() | {"checks": checks})
    run.machine = Machine(run.job)
    return run


def probed(
    node: int, nodes: tuple[int, ...], *named: tuple[int, ...], number: int = 1, generation: int = 0
) -> NodeProbed:
    """The report of a node; the first one's has the result, which names some."""
    suspects = tuple(ProbeSuspect(stage=ProbeStage.PAIRS, nodes=each) for each in named)
    outcome = ProbeOutcome.FAILED if named else ProbeOutcome.PASSED
    result = ProbeResult(rank=0, outcome=outcome, elapsed_s=1.0, suspects=suspects) if node == nodes[0] else None
    return NodeProbed(
        at=3.0,
        node=node,
        generation=generation,
        replica=0,
        number=number,
        port=7000 + number,
        nodes=nodes,
        result=result,
    )


def test_ranks_start_once_the_probe_has_ended_on_every_node() -> None:
    run = probed_run()
    run.do(joined(0), joined(1), checked(0))
    assert run.do(checked(1)) == [StartProbe(replica=0, number=1, members=(0, 1))]
    assert run.do(probed(0, (0, 1))) == []
    (start,) = run.do(probed(1, (0, 1)))
    assert isinstance(start, StartAttempt)
    assert start.master_port == 7001  # the probe has used the other one
    assert not [key for key in run.state.timers if key.startswith("probe")]


def test_node_that_the_probe_names_is_replaced_and_its_successor_probed_with_some_others() -> None:
    run = probed_run(nodes=6)
    everyone = tuple(range(6))
    run.do(*map(joined, everyone), *map(checked, everyone))
    run.do(*(probed(node, everyone, (2,)) for node in everyone[:-1]))
    commands = run.do(probed(5, everyone))
    assert [type(command) for command in commands if isinstance(command, StartAttempt | ReplaceNode)] == [ReplaceNode]
    assert [(finding.code, finding.where) for finding in reported(run)] == [("probe-pairs", "node2")]
    run.do(gone(2), joined(2, generation=1))
    some = (0, 1, 2, 3)
    assert run.do(checked(2, generation=1)) == [StartProbe(replica=0, number=2, members=some)]
    run.do(*(probed(node, some, number=2) for node in (0, 1, 3)))
    (start,) = run.do(probed(2, some, number=2, generation=1))
    assert isinstance(start, StartAttempt)
    assert start.nodes == everyone


def test_node_lost_in_a_probe_ends_that_of_the_others() -> None:
    run = probed_run()
    run.do(joined(0), joined(1), checked(0), checked(1))
    assert stop_order(0) in run.do(gone(1))
    run.do(probed(0, (0, 1)))
    assert run.state.nodes[0].probe is ProbePhase.NONE  # it was measured with a node that is gone
    run.do(joined(1, generation=1))
    assert run.do(checked(1, generation=1)) == [StartProbe(replica=0, number=2, members=(0, 1))]


def test_node_that_does_not_end_its_probe_has_failed() -> None:
    run = probed_run()
    run.do(joined(0), joined(1), checked(0), checked(1), probed(0, (0, 1)))
    commands = run.do(TimerExpired(at=100.0, timer="probe:0"))
    assert [command.node_id.node for command in commands if isinstance(command, ReplaceNode)] == [1]
    assert [finding.code for finding in reported(run)] == ["probe-hangs"]
    assert run.do(probed(1, (0, 1))) == []  # too late


def test_node_lost_after_its_report_makes_the_result_useless() -> None:
    run = probed_run()
    run.do(joined(0), joined(1), checked(0), checked(1), probed(1, (0, 1)))
    assert stop_order(0) in run.do(gone(1))
    run.do(joined(1, generation=1), probed(0, (0, 1)))
    assert run.state.nodes[1].probe is ProbePhase.NONE
    assert run.do(checked(1, generation=1)) == [StartProbe(replica=0, number=2, members=(0, 1))]


def test_probe_in_which_an_agent_was_away_is_stopped_and_repeated() -> None:
    run = probed_run()
    run.do(joined(0), joined(1), checked(0), checked(1))
    assert run.do(left(0)) == [stop_order(0, 1)]
    assert run.do(joined(0, at=50.0)) == [stop_order(0)]
    assert run.state.timers["probe:0"] > 50.0 + DEADLINE_S
    run.do(probed(1, (0, 1)))
    assert run.do(probed(0, (0, 1))) == [StartProbe(replica=0, number=2, members=(0, 1))]


def stop_order(*nodes: int) -> Send:
    return Send(order=StopProbe(replica=0, number=1, nodes=(0, 1)), nodes=nodes)


def test_fault_of_no_node_in_particular_ends_the_run() -> None:
    run = probed_run(nodes=3)
    run.do(*map(joined, range(3)), *map(checked, range(3)))
    run.do(probed(0, (0, 1, 2), (0, 1, 2)), probed(1, (0, 1, 2)), probed(2, (0, 1, 2)))
    assert run.state.ending is not None
    assert run.state.ending.exit_code == ExitCode.CANNOT_RUN_HERE


def test_no_node_is_requested_when_the_second_one_that_the_probe_names_ends_the_run() -> None:
    """The first costs no restart: the loss before is its failure too. The slot of the second is lost again."""
    run = probed_run(nodes=3, max_restarts=1)
    everyone = (0, 1, 2)
    run.do(*map(joined, everyone), *map(checked, everyone), *(probed(node, everyone) for node in everyone))
    run.do(gone(2), stopped(0), stopped(1))
    run.do(joined(0), joined(1), joined(2, generation=1), checked(2, generation=1))
    run.do(probed(0, everyone, (1,), (2,), number=2), probed(1, everyone, number=2))
    commands = run.do(probed(2, everyone, number=2, generation=1))
    assert run.state.ending is not None
    assert "recovery.max_restarts is 1" in run.state.ending.reason
    assert not [command for command in commands if isinstance(command, ReplaceNode)]


def test_promoted_standby_starts_at_once() -> None:
    run = probed_run(standby=1)
    run.do(*map(joined, range(3)), *map(checked, range(3)))
    run.do(probed(0, (0, 1)), probed(1, (0, 1)), StandbyReady(at=4.0, node=2, generation=0))
    run.do(gone(1))
    assert run.state.nodes[2].probe is ProbePhase.PASSED
    run.do(stopped(0))
    assert run.state.replicas[0].members == (0, 2)
    assert run.state.replicas[0].attempt == 1


def test_fault_of_no_node_in_particular_ends_no_run_in_which_other_replicas_train() -> None:
    run = probed_run(nodes=4, replicas=2)
    run.do(*map(joined, range(4)), *map(checked, range(4)), probed(0, (0, 1)), probed(1, (0, 1)))
    bad = (2, 3)
    run.do(*(msgspec.structs.replace(probed(node, bad), replica=1) for node in bad[1:]))
    crash = msgspec.structs.replace(probed(2, bad), replica=1, result=None, problem="Abort", crashed=True)
    run.do(crash)
    assert run.state.ending is None
    assert run.state.replicas[0].is_running
    assert run.state.nodes[2].generation == 1
