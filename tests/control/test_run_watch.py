"""What ranks send with their steps becomes events: stragglers, data stalls, and slow runs with what has grown."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.control.run_watch import STACKS_AGAIN_S, RunWatch
from holdfast.control.state import ReplicaPhase, ReplicaState
from holdfast.events import (
    AnyEvent,
    FindingRaised,
    StackDumpRequested,
    StacksCompared,
    StepCommitted,
    StepTimesCompared,
    StragglerObserved,
)
from holdfast.findings import Finding, Severity
from holdfast.job.spec import Job
from holdfast.protocol.orders import NodeStep, Progress, RankStack, StackRound
from holdfast.protocol.phase_times import Phase, PhaseTimes

USUAL = {Phase.DATA: 0.1, Phase.FORWARD: 0.3, Phase.BACKWARD: 0.5, Phase.OPTIMIZER: 0.05, Phase.HOST: 0.05}


def times(rank: int, last_step: int, **slow: float) -> PhaseTimes:
    phases = tuple(USUAL.get(phase, 0.01) + slow.get(phase.value, 0.0) for phase in Phase)
    return PhaseTimes(rank=rank, first_step=last_step - 4, last_step=last_step, phases=phases, loader="Loader")


def progress(node: int, *phases: PhaseTimes, attempt: int = 0) -> Progress:
    steps = (NodeStep(step=phases[0].last_step, started=0.0, ended=1.0),)
    return Progress(node=node, replica=0, attempt=attempt, steps=steps, phases=phases)


def observed(watch: RunWatch, *, steps: int, attempt: int = 0, **slow: float) -> list[AnyEvent]:
    """What is observed in two nodes with two ranks each, of which ranks 2 and 3 are slow."""
    found: list[AnyEvent] = []
    for last in range(4, steps, 5):
        fast = [times(rank, last) for rank in (0, 1)]
        late = [times(2, last, **slow), times(3, last, **{name: 0.9 * seconds for name, seconds in slow.items()})]
        for node, rows in ((0, fast), (1, late)):
            found += watch.add_phases(progress(node, *rows, attempt=attempt), float(last))
            found += watch.add_phases(progress(node, *rows, attempt=attempt), float(last))  # sent again
    return [each for each in found if not isinstance(each, StepTimesCompared)]


def test_slowest_rank_of_a_node_is_named_once_in_each_attempt() -> None:
    watch = RunWatch()
    for attempt in (0, 1):
        (found,) = observed(watch, steps=60, attempt=attempt, backward=0.3)
        assert isinstance(found, StragglerObserved)
        assert (found.node, found.rank, found.phase, found.attempt) == (1, 2, "backward", attempt)
        assert found.finding.where == "rank 2 on node1"
        assert found.finding.evidence[-1] == "also slow on this node: ranks 3"
    assert observed(watch, steps=60, attempt=2) == []


def test_ranks_that_wait_for_data_are_reported_with_their_loader() -> None:
    """All wait, so that none of them is slower than the others."""
    watch, found = RunWatch(), list[AnyEvent]()
    for last in range(4, 60, 5):
        for node in (0, 1):
            rows = [times(2 * node + n, last, data=0.9) for n in (0, 1)]
            found += watch.add_phases(progress(node, *rows), last)
    (stall,) = [each.finding for each in found if isinstance(each, FindingRaised)]
    assert (stall.code, stall.where) == ("data-stall", "rank 0 on node0")
    assert "`Loader`" in stall.what
    assert "2 ranks wait so" in stall.evidence  # a first round has only the node that was heard of first


def test_rank_that_waits_for_data_longer_than_others_is_reported_once_as_a_data_stall() -> None:
    (found,) = observed(RunWatch(), steps=60, data=0.9)
    assert isinstance(found, StragglerObserved)
    assert (found.finding.code, found.finding.where) == ("data-stall", "rank 2 on node1")
    assert "because it waits for samples from `Loader`" in found.finding.what


def test_rank_that_is_slow_in_communication_is_named_although_its_node_was_heard_of_late() -> None:
    """Arrivals are compared only within the same steps."""
    watch, found = RunWatch(), list[AnyEvent]()
    for last in range(4, 120, 5):
        late_s = 0.2 if last > 60 else 0.0
        for node in (0, 1):
            rows = [
                replace(times(rank, last, communication=late_s), arrived=last + (late_s if rank == 2 else 0.0))
                for rank in (2 * node, 2 * node + 1)
            ]
            found += watch.add_phases(progress(node, *rows), float(last))
    (one,) = [each for each in found if isinstance(each, StragglerObserved)]
    assert (one.rank, one.phase) == (2, "communication")


def test_node_that_is_always_ahead_is_compared_over_the_same_steps() -> None:
    """All times but the first are in a round, so that 20 steps name a straggler."""
    watch, found = RunWatch(), list[AnyEvent]()
    for last in range(4, 60, 5):
        ahead = [times(rank, last + 5) for rank in (0, 1)]
        behind = [times(2, last, forward=0.9), times(3, last)]
        for node, rows in ((0, ahead), (1, behind)):
            found += watch.add_phases(progress(node, *rows), float(last))
    (one,) = [each for each in found if isinstance(each, StragglerObserved)]
    assert (one.rank, one.phase, one.last_step) == (2, "forward", 29)


def test_nodes_whose_times_span_different_steps_are_compared_too() -> None:
    watch, found = RunWatch(), list[AnyEvent]()
    for last in range(9, 200, 10):
        short = [times(rank, end) for end in (last - 5, last) for rank in (0, 1)]
        long = [replace(times(rank, last), first_step=last - 9) for rank in (2, 3)]
        long = [
            replace(each, phases=(*each.phases[:1], 0.9, *each.phases[2:])) if each.rank == 2 else each for each in long
        ]
        for node, rows in ((0, short), (1, long)):
            found += watch.add_phases(progress(node, *rows), float(last))
    (one,) = [each for each in found if isinstance(each, StragglerObserved)]
    assert (one.rank, one.phase) == (2, "forward")


def test_invalid_times_are_ignored() -> None:
    watch, wrong = RunWatch(), PhaseTimes(rank=0, first_step=0, last_step=4, phases=(1.0,))
    assert watch.add_phases(progress(0, wrong, times(1, 4)), 0.0) == []
    assert watch.add_phases(progress(1, times(2, 4)), 0.0) == []


def test_slow_run_is_reported_with_what_has_grown_and_what_was_reported_meanwhile() -> None:
    watch, found = RunWatch(), list[AnyEvent]()
    throttled = Finding(code="gpu-throttled", severity=Severity.WARNING, what="GPU 3 of node1 is throttled")
    ended = 0.0
    for step in range(1, 400):
        slow = step > 200
        if step % 5 == 4:
            slow_s = 0.2 if slow else 0.0
            rows = [times(rank, step, communication=slow_s) for rank in (0, 1)]
            found += watch.add_phases(progress(0, *rows), ended)
        started, ended = ended, ended + (1.2 if slow else 1.0)
        if step == 230:
            watch.note(FindingRaised(at=ended, finding=throttled))
        committed = StepCommitted(at=ended, replica=0, attempt=0, step=step, started=started, ended=ended)
        found += watch.add_step(committed, nodes=1)
    event, request = (each for each in found if not isinstance(each, StepTimesCompared))
    assert isinstance(request, StackDumpRequested)
    assert (request.rounds, request.replica) == (5, 0)
    assert isinstance(event, FindingRaised)
    assert event.finding.code == "run-slow"
    assert "20% longer" in event.finding.what
    assert event.finding.evidence == (
        "`communication` takes 200.0 ms more per step",
        "meanwhile: gpu-throttled: GPU 3 of node1 is throttled",
    )


def test_stacks_are_requested_for_a_straggler_whose_phase_does_not_tell_why_and_not_again_soon() -> None:
    def requests(found: list[AnyEvent]) -> list[AnyEvent]:
        return [each for each in found if isinstance(each, StackDumpRequested)]

    assert requests(observed(RunWatch(), steps=60, backward=0.5)) == []
    watch = RunWatch()
    assert len(requests(observed(watch, steps=60, host=0.5))) == 1
    assert requests(observed(watch, steps=60, attempt=1, host=0.5)) == []
    later = int(STACKS_AGAIN_S) // 5 * 5
    watch.add_phases(progress(0, times(0, 4), attempt=2), 0.0)
    found: list[AnyEvent] = []
    for last in range(later + 4, later + 104, 5):
        for node, rows in ((0, [times(0, last)]), (1, [times(1, last, host=0.5)])):
            found += watch.add_phases(progress(node, *rows, attempt=3), float(last))
    assert len(requests(found)) == 1


JOB = Job.model_validate({"command": ["true"], "nodes": 3, "ranks_per_node": 2})
REPLICA = ReplicaState(replica=0, phase=ReplicaPhase.RUNNING, attempt=1, members=(0, 4, 2))
SYNC, READS = ("all_reduce (distributed_c10d.py)",), ("read (data.py:7)",)


def dumps(number: int, rank: int, *, at: float = 9.0, attempt: int = 1) -> list[StackRound]:
    """A round in which all wait for a rank; ranks 2 and 3 are on node 4."""
    return [
        StackRound(
            node=node,
            replica=0,
            attempt=attempt,
            requested_at=at,
            number=number,
            rounds=5,
            stacks=tuple(
                RankStack(rank=each, frames=READS if each == rank else SYNC) for each in (2 * place, 2 * place + 1)
            ),
        )
        for place, node in enumerate(REPLICA.members)
    ]


def test_stacks_of_all_rounds_name_the_rank_for_which_the_others_wait() -> None:
    watch, found = RunWatch(), list[AnyEvent]()
    late = dumps(0, 3)
    for message in [*dumps(1, 3), *dumps(2, 0), *late, *late, *dumps(3, 3), *dumps(0, 1, attempt=0), *dumps(4, 3)]:
        found += watch.add_stacks(message, JOB, REPLICA, 20.0)
    compared, raised = found
    assert isinstance(compared, StacksCompared)
    assert (compared.suspects, compared.nodes, compared.times, compared.rounds) == (((3, 3),), ((4, 4),), 4, 5)
    assert isinstance(raised, FindingRaised)
    assert raised.finding.what == "in 4 of 5 dumps the others wait for rank 3 on node 4"
    assert raised.finding.evidence == (
        "stacks: 5 ranks (0-2, 4-5) in all_reduce (distributed_c10d.py)",
        "stacks: rank 3 in read (data.py:7)",
    )
    assert watch.add_stacks(late[0], JOB, REPLICA, 21.0) == []


def test_round_that_lacks_a_node_is_left_out_and_an_older_request_is_forgotten() -> None:
    watch, found = RunWatch(), list[AnyEvent]()
    for message in [*dumps(0, 3), *dumps(1, 3, at=10.0)[:2], *dumps(2, 3), *dumps(4, 3, at=10.0)]:
        found += watch.add_stacks(message, JOB, REPLICA, 20.0)
    (compared,) = found
    assert isinstance(compared, StacksCompared)
    assert (compared.rounds, compared.suspects, compared.missing) == (5, (), ())
