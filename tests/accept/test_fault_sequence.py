"""When each fault of a restart check is requested."""

from __future__ import annotations

from holdfast.accept.fault_sequence import FaultSequence
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    ControllerStarted,
    FaultAction,
    FaultInjected,
    FaultRequested,
    FaultTarget,
    StepCommitted,
)


def fault(target: FaultTarget, at_step: int) -> FaultRequested:
    return FaultRequested(at=1.0, target=target, index=0, action=FaultAction.KILL, at_step=at_step)


FAULTS = (fault(FaultTarget.RANK, 10), fault(FaultTarget.CONTROLLER, 20), fault(FaultTarget.NODE, 30))


def step(number: int, *, attempt: int = 0) -> StepCommitted:
    at = float(number)
    return StepCommitted(at=at, replica=0, attempt=attempt, step=number, started=at - 1, ended=at)


def injected(at: float) -> FaultInjected:
    return FaultInjected(at=at, node=0, requested_at=1.0, target="", action="kill")


def attempt(number: int, at: float) -> AttemptStarted:
    return AttemptStarted(at=at, replica=0, attempt=number, world_size=1, master_addr="", master_port=0)


def controller(at: float) -> ControllerStarted:
    return ControllerStarted(at=at, pid=1, incarnation="a")


def requested(*events: AnyEvent, accepts: bool = True) -> list[list[FaultTarget]]:
    """The targets that had been requested after each event."""
    found: list[FaultTarget] = []

    def request(each: FaultRequested) -> bool:
        found.append(each.target)
        return accepts

    sequence = FaultSequence(FAULTS, request, patience_steps=40)
    after: list[list[FaultTarget]] = []
    for event in events:
        sequence.on_event(event)
        after.append([*found])
    return after


def test_fault_comes_when_the_run_has_recovered_from_the_last() -> None:
    rank, node = FaultTarget.RANK, FaultTarget.NODE
    told = requested(
        controller(0.0),
        attempt(0, 0.5),
        step(1),
        injected(10.5),
        step(10),
        attempt(1, 11.0),
        step(11),  # of the attempt that failed, reported late
        step(9, attempt=1),
        injected(20.5),
        attempt(2, 21.0),  # of another failure: the controller has not started again
        step(22, attempt=2),
        controller(23.0),
        step(23, attempt=2),  # begun before
        step(25, attempt=2),
    )
    assert told[1] == []
    assert told[6] == [rank]
    assert told[7] == [rank, FaultTarget.CONTROLLER]
    assert told[12] == [rank, FaultTarget.CONTROLLER]
    assert told[13] == [rank, FaultTarget.CONTROLLER, node]


def test_fault_without_effect_is_given_up_and_one_that_is_not_accepted_is_requested_again() -> None:
    told = requested(step(1), injected(10.5), step(50), step(51))
    assert [len(each) for each in told] == [1, 1, 1, 2]
    refused = requested(step(1), step(2), accepts=False)
    assert refused[-1] == [FaultTarget.RANK, FaultTarget.RANK]
