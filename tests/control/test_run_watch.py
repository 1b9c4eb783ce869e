"""What ranks send with their steps becomes events: stragglers, data stalls, and slow runs with what has grown."""

from __future__ import annotations

from holdfast.control.run_watch import RunWatch
from holdfast.events import AnyEvent, FindingRaised, StepCommitted, StragglerObserved
from holdfast.findings import Finding, Severity
from holdfast.protocol.orders import NodeStep, Progress
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
    return found


def test_slowest_rank_of_a_node_is_named_once_in_each_attempt() -> None:
    watch = RunWatch()
    for attempt in (0, 1):
        (found,) = observed(watch, steps=60, attempt=attempt, backward=0.5)
        assert isinstance(found, StragglerObserved)
        assert (found.node, found.rank, found.phase, found.attempt) == (1, 2, "backward", attempt)
        assert found.finding.where == "rank 2 on node1"
        assert found.finding.evidence[-1] == "also slow on this node: ranks 3"
    assert observed(watch, steps=60, attempt=2) == []


def test_ranks_that_wait_for_data_are_reported_with_their_loader() -> None:
    found = [each for each in observed(RunWatch(), steps=60, data=0.9) if isinstance(each, FindingRaised)]
    (stall,) = [each.finding for each in found]
    assert (stall.code, stall.where) == ("data-stall", "rank 2 on node1")
    assert "`Loader`" in stall.what
    assert "2 ranks wait so" in stall.evidence


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
    (event,) = found
    assert isinstance(event, FindingRaised)
    assert event.finding.code == "run-slow"
    assert "20% longer" in event.finding.what
    assert event.finding.evidence == (
        "`communication` takes 200.0 ms more per step",
        "meanwhile: gpu-throttled: GPU 3 of node1 is throttled",
    )
