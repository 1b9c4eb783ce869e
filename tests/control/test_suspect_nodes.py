"""Which failures make a node suspect, which do not, and what the run does with a suspect node."""

from __future__ import annotations

import signal

import msgspec
import pytest
from msgspec.structs import replace
from tests.control.test_device_faults import decided, replacements
from tests.control.test_machine import Run, gone, joined, killed, leaving, stopped
from tests.control.test_root_cause import INSIDE, OUTSIDE, hung, root_cause
from tests.control.test_standby_promotion import promotions, ready
from tests.golden import Golden, printed

from holdfast.control.commands import AvoidMachine
from holdfast.control.policy import Action, Failure, FailureKind, Spare, decide
from holdfast.events import CollectiveCall, FaultInjected, GroupCollectives, NodeCreated
from holdfast.findings import Owner
from holdfast.job.backend import NodeId
from holdfast.job.spec import Recovery

RECOVERY = Recovery(max_restarts=100)
SEGFAULT = Failure(
    kind=FailureKind.KILLED,
    at=100_000.0,
    node=1,
    machine="m7",
    attempt=4,
    rank=3,
    code=signal.SIGSEGV,
    step=50,
    has_session=True,
    uptime_s=600.0,
)
HUNG = replace(SEGFAULT, kind=FailureKind.HUNG, code=0, error="no step after step 50", holds_up_others=True)
LOST = replace(SEGFAULT, kind=FailureKind.NODE_LOST, code=0, rank=None, error="its agent ended")
CRASHED = replace(SEGFAULT, kind=FailureKind.CRASHED, code=1, error="ValueError: bad shape")
HOUR_S = 3600.0


def before(failure: Failure, **changes: object) -> Failure:
    """A failure an hour and some steps earlier."""
    return replace(failure, **{"at": failure.at - HOUR_S, "attempt": 3, "step": 20, **changes})  # type: ignore[arg-type]


def is_suspect(failure: Failure, *earlier: Failure, recovery: Recovery = RECOVERY) -> bool:
    verdict = decide(failure, earlier, recovery)
    assert verdict.action in (Action.RESTART, Action.REPLACE_NODE)
    return verdict.is_suspicion


@pytest.mark.parametrize(
    "failure",
    [
        *(replace(SEGFAULT, code=int(each)) for each in (signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGKILL)),
        replace(SEGFAULT, error="Fatal Python error: Segmentation fault"),
        replace(SEGFAULT, code=signal.SIGKILL, error="ValueError: caught long ago"),
        replace(SEGFAULT, has_session=False, step=0),
        HUNG,
    ],
    ids=["bus", "illegal", "abort", "kill", "fault handler", "kill after an error", "no Session", "hang"],
)
def test_node_is_replaced_at_the_second_failure_that_its_machine_may_have_caused(failure: Failure) -> None:
    assert not is_suspect(failure)
    for first in (before(failure, step=failure.step), before(SEGFAULT), before(HUNG), before(LOST)):
        verdict = decide(failure, (first,), RECOVERY)
        assert (verdict.action, verdict.replace_node) == (Action.REPLACE_NODE, True)
        assert verdict.finding.what.endswith(
            "failure 2 of this node within recovery.suspect_window_s, 86400 s, and none like it elsewhere"
        )
        assert verdict.finding.owner is Owner.CLUSTER
        assert verdict.finding.evidence[-1].startswith("3600 s before: ")


@pytest.mark.parametrize(
    "failure",
    [
        CRASHED,
        replace(SEGFAULT, code=signal.SIGFPE),
        replace(SEGFAULT, code=signal.SIGTERM),
        replace(SEGFAULT, code=signal.SIGABRT, error="terminate called after throwing an instance of 'x'"),
        replace(SEGFAULT, code=signal.SIGKILL, error="Connection closed by peer", is_peer_symptom=True),
        replace(SEGFAULT, step=0),
        replace(SEGFAULT, excused=True),
        replace(SEGFAULT, kind=FailureKind.OUT_OF_MEMORY, code=signal.SIGKILL),
        replace(HUNG, holds_up_others=False),
        replace(HUNG, step=0),
    ],
    ids=[
        "a program error",
        "a division",
        "a request",
        "a C++ exception",
        "a peer",
        "before the first step",
        "a drill",
        "a memory limit",
        "a hang without a culprit",
        "a hang before the first step",
    ],
)
def test_failure_with_another_explanation_makes_no_node_suspect(failure: Failure) -> None:
    assert not is_suspect(failure, before(SEGFAULT))
    assert not is_suspect(SEGFAULT, before(failure, step=failure.step))


@pytest.mark.parametrize("failure", [SEGFAULT, HUNG])
@pytest.mark.parametrize("rank", [3, 0], ids=["the same rank", "another rank"])
def test_failure_that_another_machine_had_as_well_is_the_programs(failure: Failure, rank: int) -> None:
    elsewhere = before(failure, node=0, machine="m1", rank=rank)
    assert not is_suspect(failure, elsewhere)
    assert not is_suspect(failure, before(failure), elsewhere)
    assert not is_suspect(failure, elsewhere, before(failure))
    assert is_suspect(failure, before(failure), replace(elsewhere, excused=True))
    assert is_suspect(failure, before(failure), replace(elsewhere, at=failure.at - 2 * 86_400.0))


def test_rank_that_also_fails_on_the_next_machine_makes_no_second_machine_suspect() -> None:
    known: list[Failure] = []
    machines = ["m7", "m7", "m8", "m8", "m8"]
    for number, machine in enumerate(machines):
        failure = replace(SEGFAULT, at=SEGFAULT.at + number * HOUR_S, machine=machine, step=50 + number)
        assert is_suspect(failure, *known) is (number == 1)
        known.append(failure)


def test_failure_of_another_replica_acquits_a_machine_and_accuses_none() -> None:
    several = Recovery(max_restarts=100, replicas=2)
    other = before(SEGFAULT, node=0, machine="m1", replica=1)
    assert not is_suspect(SEGFAULT, before(SEGFAULT), other, recovery=several)
    assert is_suspect(SEGFAULT, before(SEGFAULT), replace(other, code=signal.SIGBUS), recovery=several)
    assert not is_suspect(SEGFAULT, before(SEGFAULT, replica=1), recovery=several)


def test_earlier_failures_of_another_replica_spend_no_restart_and_make_no_crash_loop() -> None:
    several = Recovery(max_restarts=3, replicas=2)
    others = tuple(replace(CRASHED, at=CRASHED.at - number, replica=1) for number in range(9))
    assert decide(CRASHED, others, several).action is Action.RESTART


@pytest.mark.parametrize("first", [SEGFAULT, HUNG, LOST], ids=["signal", "hang", "lost agent"])
def test_lost_agent_makes_a_node_suspect_as_the_second_failure_too(first: Failure) -> None:
    verdict = decide(LOST, (before(first),), RECOVERY)
    assert (verdict.action, verdict.is_suspicion, verdict.replace_node) == (Action.REPLACE_NODE, True, True)
    assert verdict.finding.evidence[-1].startswith("3600 s before: ")
    for other in (before(first, machine="m8"), before(first, excused=True)):
        assert not is_suspect(LOST, other)
    assert not is_suspect(replace(LOST, evicted=True), before(first))


def test_replica_that_fails_soon_again_is_not_suspected_but_flaps() -> None:
    several = Recovery(max_restarts=100, replicas=2)
    assert is_suspect(SEGFAULT, before(SEGFAULT), recovery=several)
    assert not is_suspect(replace(SEGFAULT, uptime_s=59.0), before(SEGFAULT), recovery=several)
    assert is_suspect(replace(SEGFAULT, uptime_s=59.0), before(SEGFAULT))


def test_lost_nodes_elsewhere_are_no_ones_program_error() -> None:
    assert is_suspect(SEGFAULT, before(LOST), before(LOST, node=0, machine="m1"))


@pytest.mark.parametrize(
    ("earlier", "recovery"),
    [
        (before(SEGFAULT, machine="m8"), RECOVERY),
        (replace(SEGFAULT, at=SEGFAULT.at - 86_400.0, step=20), RECOVERY),
        (before(SEGFAULT), Recovery(max_restarts=100, suspect_window_s=HOUR_S)),
    ],
    ids=["another machine", "too long ago", "a shorter window"],
)
def test_failures_count_on_one_machine_and_within_the_window(earlier: Failure, recovery: Recovery) -> None:
    assert not is_suspect(SEGFAULT, earlier, recovery=recovery)


def test_device_fault_and_a_signal_on_one_machine_count_together() -> None:
    contained = replace(SEGFAULT, kind=FailureKind.GPU_MEMORY_ERROR_CONTAINED, code=1)
    assert is_suspect(SEGFAULT, before(contained))
    assert is_suspect(contained, before(SEGFAULT))
    assert not is_suspect(contained, before(CRASHED))


def test_finding_of_a_device_fault_after_a_signal_has_the_repair_and_denies_no_failure_elsewhere(
    golden: Golden,
) -> None:
    contained = replace(SEGFAULT, kind=FailureKind.GPU_MEMORY_ERROR_CONTAINED, code=1)
    finding = decide(contained, (before(SEGFAULT), before(contained, node=0, machine="m1")), RECOVERY).finding
    lost = decide(LOST, (before(SEGFAULT), before(LOST, node=0, machine="m1")), RECOVERY).finding
    golden(printed(finding), printed(lost))


def test_machine_of_a_suspect_node_may_be_used_again(golden: Golden) -> None:
    verdicts = [decide(SEGFAULT, (before(SEGFAULT),), RECOVERY, spare) for spare in Spare]
    assert not any(verdict.avoid_machine for verdict in verdicts)
    actions = [Action.PROMOTE if spare is Spare.STANDBY else Action.REPLACE_NODE for spare in Spare]
    assert [verdict.action for verdict in verdicts] == actions
    golden(*(f"{spare.name}\n{printed(verdict.finding)}" for spare, verdict in zip(Spare, verdicts, strict=True)))


# The root cause


OTHER_CALL = GroupCollectives(
    group="0",
    enqueued=41,
    completed=40,
    pending=41,
    calls=(CollectiveCall(seq=41, op="broadcast", sizes="[[4]] Float"),),
)


def test_hang_is_of_the_rank_that_the_recorders_name_unless_its_calls_do_not_fit() -> None:
    assert root_cause(hangs=(hung(0, **INSIDE), hung(1, **OUTSIDE))).holds_up_others
    assert not root_cause(hangs=(hung(0), hung(1, top_frame="load (data.py:1)"))).holds_up_others
    mismatch = root_cause(hangs=(hung(0, **INSIDE), hung(1, collectives=(OTHER_CALL,)), hung(2, **INSIDE)))
    assert (mismatch.rank, mismatch.holds_up_others) == (1, False)
    stopped_rank = hung(1, **OUTSIDE, process_state="T")
    assert not root_cause(hangs=(hung(0, **INSIDE), stopped_rank)).holds_up_others


# The run


def kill(run: Run, node: int, *, attempt: int, at: float) -> None:
    """SIGKILL a rank that runs for long, and stop the others."""
    run.do(killed(node, attempt=attempt, at=at))
    for each in run.state.replicas[0].members:
        run.do(stopped(each, attempt=attempt))


def test_node_whose_rank_is_killed_twice_is_started_again(golden: Golden) -> None:
    run = Run(nodes=2, max_restarts=10).running()
    kill(run, 1, attempt=0, at=100.0)
    run.do(killed(1, attempt=1, at=300.0), stopped(0, attempt=1))
    (request,) = replacements(run.do(stopped(1, attempt=1)))
    assert request.node_id == NodeId(node=1, generation=1)  # type: ignore[union-attr]
    golden(printed(decided(run).finding))


def test_ready_standby_takes_the_place_of_a_suspect_node_whose_machine_is_not_avoided() -> None:
    run = Run(nodes=2, standby=1, max_restarts=10)
    run.do(NodeCreated(at=0.5, node=1, generation=0, machine="m7"))
    run.running()
    run.do(ready(2))
    kill(run, 1, attempt=0, at=100.0)
    run.do(killed(1, attempt=1, at=300.0), stopped(0, attempt=1))
    commands = run.do(stopped(1, attempt=1))
    assert promotions(run) == [(2, 1)]
    assert not [one for one in commands if isinstance(one, AvoidMachine)]


def test_finding_says_that_a_standby_took_the_place_of_a_suspect_node_that_was_lost_meanwhile() -> None:
    run = Run(nodes=2, standby=1, max_restarts=10)
    run.do(*(NodeCreated(at=0.5, node=node, generation=0, machine=f"m{node}") for node in range(3)))
    run.running()
    run.do(ready(2))
    kill(run, 1, attempt=0, at=100.0)
    run.do(killed(1, attempt=1, at=300.0), gone(1, at=301.0))
    assert promotions(run) == [(2, 1)]
    run.do(stopped(0, attempt=1))
    assert decided(run).action == Action.PROMOTE
    assert decided(run).finding.remedy.startswith(Spare.STANDBY)


@pytest.mark.parametrize(("target", "suspect"), [("rank 1", False), ("node", False), ("nic 1", True)])
def test_drill_makes_no_node_suspect_unless_it_imitates_a_failed_device(target: str, suspect: bool) -> None:
    run = Run(nodes=2, max_restarts=10).running()
    run.do(FaultInjected(at=99.0, node=1, requested_at=98.0, target=target, action="kill"))
    kill(run, 1, attempt=0, at=100.0)
    kill(run, 1, attempt=1, at=300.0)
    assert (run.state.nodes[1].generation == 1) is suspect
    if not suspect:
        kill(run, 1, attempt=2, at=400.0)
        assert run.state.nodes[1].generation == 1


@pytest.mark.parametrize("lost", [(1,), (0, 1)], ids=["alone", "with another"])
def test_loss_of_one_node_counts_against_its_machine_and_that_of_several_does_not(lost: tuple[int, ...]) -> None:
    run = Run(nodes=2, max_restarts=10)
    run.do(*(NodeCreated(at=0.5, node=node, generation=0, machine=f"m{node}") for node in range(2)))
    run.running()
    run.do(*(gone(node, at=100.0) for node in lost), *(stopped(node) for node in range(2) if node not in lost))
    for node in lost:
        run.do(NodeCreated(at=101.0, node=node, generation=1, machine=f"m{node}"))
        run.do(joined(node, generation=1, incarnation=f"j{node}", at=102.0))
    kill(run, lost[0], attempt=1, at=300.0)
    assert run.state.nodes[lost[0]].generation == (2 if len(lost) == 1 else 1)


def test_segfaults_of_several_replicas_move_with_the_program() -> None:
    run = Run(nodes=2, replicas=2, max_restarts=10).running()
    for at, replica, attempt in ((100.0, 0, 0), (200.0, 1, 0), (400.0, 0, 1)):
        run.do(msgspec.structs.replace(killed(replica, replica=replica, rank=0, attempt=attempt, at=at), code=11))
        run.do(stopped(replica, replica=replica, attempt=attempt))
    assert run.state.nodes[0].generation == 0


def test_agent_that_restarts_in_place_counts_against_its_machine() -> None:
    run = Run(nodes=2, max_restarts=10).running()
    run.do(joined(1, at=100.0, incarnation="b"), stopped(0))
    assert run.state.nodes[1].generation == 0
    run.do(joined(1, at=300.0, incarnation="c"))
    (request,) = replacements(run.do(stopped(0, attempt=1)))
    assert request.node_id == NodeId(node=1, generation=1)  # type: ignore[union-attr]


def test_node_that_ends_after_its_preemption_notice_counts_against_no_machine() -> None:
    run = Run(nodes=2, max_restarts=10).running()
    run.do(leaving(1, at=99.0), gone(1, at=100.0), stopped(0))
    run.do(NodeCreated(at=101.0, node=1, generation=1, machine="node1.0"))
    run.do(joined(1, generation=1, incarnation="b", at=102.0))
    kill(run, 1, attempt=1, at=300.0)
    assert run.state.nodes[1].generation == 1


def test_node_that_was_lost_and_is_back_before_its_replica_is_judged_is_not_replaced_again() -> None:
    run = Run(nodes=2, max_restarts=10)
    run.do(*(NodeCreated(at=0.5, node=node, generation=0, machine=f"m{node}") for node in range(2)))
    run.running()
    kill(run, 1, attempt=0, at=100.0)
    requests = run.do(killed(1, attempt=1, at=300.0), gone(1, at=301.0))
    run.do(NodeCreated(at=302.0, node=1, generation=1, machine="m2"))
    run.do(joined(1, generation=1, incarnation="b", at=303.0))
    requests += run.do(stopped(0, attempt=1))
    assert len(replacements(requests)) == 1
    assert run.state.nodes[1].generation == 1


def test_rank_and_machine_of_a_failure_survive_in_the_evidence_of_the_next(golden: Golden) -> None:
    verdict = decide(HUNG, (before(SEGFAULT),), RECOVERY)
    golden(printed(verdict.finding))
    assert msgspec.json.encode(verdict.finding)
