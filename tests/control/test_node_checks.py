"""A node gets ranks only after its checks; one that fails is replaced, and not for ever."""

from __future__ import annotations

from msgspec.structs import replace
from tests.control.test_machine import Run, gone, joined, left, made

from holdfast.control.commands import AvoidMachine, CheckNode, ReplaceNode, StartAttempt
from holdfast.control.machine import Machine
from holdfast.control.state import CheckPhase, ReplicaPhase
from holdfast.events import FindingRaised, NodeChecked, NodeCreated, ShutdownDecided, TimerExpired
from holdfast.findings import CheckResult, Finding, Owner
from holdfast.job.backend import NodeId
from holdfast.job.quarantine import Certainty
from holdfast.job.spec import CheckLevel, Checks, Job

BROKEN = CheckResult(
    check="gpu-ecc", findings=(Finding(code="gpu-ecc-errors", what="GPU 3 has errors", where="GPU 3"),)
)
DEADLINE_S = 30.0


def checked_run(nodes: int = 2, least: int | None = None) -> Run:
    run = Run(nodes=nodes, least=least)
    checks = Checks(before_start=CheckLevel.QUICK, deadline_s=DEADLINE_S)
    run.job = Job.model_validate(run.job.model_dump() | {"checks": checks})
    run.machine = Machine(run.job)
    return run


def checked(
    node: int, *results: CheckResult, generation: int = 0, number: int = 0, at: float = 2.0, **facts: str
) -> NodeChecked:
    return NodeChecked(at=at, node=node, generation=generation, number=number, results=results, facts=facts)


def reported(run: Run) -> list[Finding]:
    return [event.finding for event in run.decisions if isinstance(event, FindingRaised)]


def test_ranks_start_once_every_node_has_passed() -> None:
    run = checked_run()
    assert run.do(joined(0)) == [CheckNode(node=0, number=0)]
    assert run.do(checked(0)) == []
    assert run.do(joined(1)) == [CheckNode(node=1, number=0)]
    assert [type(command) for command in run.do(checked(1))] == [StartAttempt]


def test_node_that_fails_is_replaced_and_its_machine_avoided() -> None:
    run = checked_run()
    run.do(made(0), made(1), joined(0), joined(1), checked(0))
    commands = run.do(checked(1, BROKEN))
    assert commands == [
        AvoidMachine(node_id=NodeId(node=1, generation=0), machine=""),
        ReplaceNode(node_id=NodeId(node=1, generation=1), reason="GPU 3 has errors"),
    ]
    (found, *_) = reported(run)
    assert (found.code, found.where) == ("gpu-ecc-errors", "GPU 3 on node1")
    assert found.what == "node1 gets no ranks: GPU 3 has errors"
    assert run.phase() is ReplicaPhase.GATHERING
    run.do(gone(1), made(1, generation=1), joined(1, generation=1))
    assert [type(command) for command in run.do(checked(1, generation=1))] == [StartAttempt]


def test_problem_of_the_cluster_is_remembered_of_its_machine_and_one_of_the_job_is_not() -> None:
    for owner, remembered in ((Owner.CLUSTER, Certainty.CHECK), (Owner.USER, None)):
        run = checked_run()
        run.do(NodeCreated(at=0.5, node=1, generation=0, machine="m7"), joined(0), joined(1), checked(0))
        problem = CheckResult(check="gpu-ecc", findings=(replace(BROKEN.findings[0], owner=owner),))
        (avoid, _) = run.do(checked(1, problem))
        assert isinstance(avoid, AvoidMachine)
        assert (avoid.machine, avoid.evidence and avoid.evidence.certainty) == ("m7", remembered)


def test_run_ends_when_the_next_node_fails_too() -> None:
    run = checked_run()
    run.do(joined(0), joined(1), checked(0), checked(1, BROKEN), gone(1), joined(1, generation=1))
    run.do(checked(1, BROKEN, generation=1))
    (end,) = (event for event in run.decisions if isinstance(event, ShutdownDecided))
    assert end.finding is not None
    assert end.finding.code == "node-check-failed"
    assert end.finding.what == "node1 failed its checks, and so did the node that it replaced"
    assert end.finding.evidence == ("GPU 3 has errors",)
    assert "--set checks=off" in end.finding.remedy


def test_run_that_a_node_ends_waits_for_the_reports_of_the_others() -> None:
    run = checked_run()
    run.do(joined(0), checked(0, BROKEN), gone(0), joined(0, generation=1), checked(0, BROKEN, generation=1))
    assert run.state.ending is None
    run.do(joined(1))
    assert run.state.ending is None
    run.do(checked(1, BROKEN))
    assert run.state.ending is not None
    assert [finding.where for finding in reported(run)] == ["GPU 3 on node1"]


def test_run_that_a_node_ends_does_not_wait_for_another_that_never_comes() -> None:
    run = checked_run()
    run.do(joined(0), checked(0, BROKEN), gone(0), joined(0, generation=1), checked(0, BROKEN, generation=1))
    assert run.state.ending is None
    run.do(TimerExpired(at=2.0 + DEADLINE_S, timer="check:0"))
    assert run.state.ending is not None


def test_node_that_does_not_report_its_checks_has_failed() -> None:
    run = checked_run(nodes=1)
    run.do(joined(0))
    run.do(TimerExpired(at=1.0 + DEADLINE_S + 5.0, timer="check:0"))
    assert [finding.code for finding in reported(run)][:1] == ["node-check-hangs"]
    assert run.do(checked(0)) == []  # too late


def test_nodes_that_differ_from_the_others_fail() -> None:
    run = checked_run(nodes=3)
    run.do(*(joined(node) for node in range(3)), checked(0, torch="2.15.0"), checked(1, torch="2.15.0"))
    run.do(checked(2, torch="2.14.1"))
    assert [finding.code for finding in reported(run)][:1] == ["node-differs"]
    assert [node.generation for node in run.state.nodes] == [0, 0, 1]


def test_difference_that_stops_no_start_is_reported_once_with_its_nodes() -> None:
    run = checked_run(nodes=5)
    run.do(*(joined(node) for node in range(5)), *(checked(node, CPUs="224") for node in (0, 2, 4)))
    run.do(checked(1, CPUs="16"), checked(3, CPUs="32"))
    assert [(finding.code, finding.where) for finding in reported(run)] == [("node-differs", "CPUs on node1, node3")]
    assert run.state.replicas[0].members == (0, 1, 2, 3, 4)


def test_nodes_are_not_compared_before_all_have_joined() -> None:
    run = checked_run(nodes=3)
    run.do(joined(0), joined(1), checked(0, torch="2.15.0"), checked(1, torch="2.14.1"))
    assert reported(run) == []
    run.do(joined(2), checked(2, torch="2.15.0"))
    assert [node.generation for node in run.state.nodes] == [0, 1, 0]


def test_elastic_run_starts_without_a_slot_whose_nodes_fail() -> None:
    run = checked_run(nodes=2, least=1)
    run.do(joined(0), joined(1), checked(0), checked(1, BROKEN), gone(1), joined(1, generation=1))
    run.do(checked(1, BROKEN, generation=1))
    assert run.state.ending is None
    assert run.phase() is ReplicaPhase.GATHERING
    (timer,) = (name for name in run.state.timers if name.startswith("min-nodes"))
    run.do(TimerExpired(at=200.0, timer=timer))
    assert run.state.replicas[0].members == (0,)


def test_static_run_with_two_slots_whose_nodes_fail_in_turn_ends() -> None:
    run = checked_run(nodes=3)
    run.do(joined(0), joined(1), joined(2), checked(2))
    run.do(checked(0, BROKEN), checked(1, BROKEN), gone(0), gone(1))
    run.do(joined(1, generation=1), checked(1, BROKEN, generation=1))
    run.do(joined(0, generation=1), checked(0, BROKEN, generation=1))
    assert run.state.ending is not None


def test_checks_have_no_deadline_while_their_agent_is_away() -> None:
    run = checked_run(nodes=1)
    run.do(joined(0), left(0))
    assert "check:0" not in run.state.timers
    assert run.do(joined(0, at=50.0)) == [CheckNode(node=0, number=0)]
    assert "check:0" in run.state.timers


def test_agent_that_reconnects_before_its_report_is_asked_again() -> None:
    run = checked_run(nodes=1)
    assert run.do(joined(0)) == [CheckNode(node=0, number=0)]
    assert run.do(joined(0, at=3.0)) == [CheckNode(node=0, number=0)]
    assert [type(command) for command in run.do(checked(0))] == [StartAttempt]
    assert run.do(joined(0, at=9.0, attempt=0)) == []


def test_nodes_are_not_checked_unless_the_job_wants_it() -> None:
    assert [type(command) for command in Run(nodes=1).do(joined(0))] == [StartAttempt]


def test_late_report_of_an_earlier_check_does_not_count_for_the_new_one() -> None:
    run = checked_run()
    run.do(joined(0), joined(1), checked(0), checked(1))
    node = replace(run.state.nodes[0], check=CheckPhase.PENDING, checks=1)
    run.state = run.state.with_nodes((node,))
    run.do(checked(0, BROKEN))
    assert run.state.nodes[0].check is CheckPhase.PENDING
    run.do(replace(checked(0), number=1))
    assert run.state.nodes[0].check is CheckPhase.PASSED
