"""Outcomes of a soak from its log: each kind of lost, repeated or unreported step is found."""

from __future__ import annotations

from bench.fault_outcomes import RecordedSteps, fault_outcomes
from msgspec.structs import replace

from holdfast.events import (
    AnyEvent,
    ControllerStarted,
    FaultAction,
    FaultRequested,
    FaultTarget,
    RecoveryDecided,
    RunCreated,
    StepCommitted,
)
from holdfast.findings import Finding
from holdfast.report.run_summary import summarise
from holdfast.report.status_reducer import status_from_events

CREATED = RunCreated(at=0, run="soak", job={})


def step(number: int, attempt: int = 0) -> StepCommitted:
    at = attempt * 100.0 + number
    return StepCommitted(at=at, replica=0, attempt=attempt, step=number, started=at - 1, ended=at)


def steps(attempt: int, first: int, last: int) -> list[StepCommitted]:
    return [step(number, attempt) for number in range(first, last + 1)]


def problems(events: list[AnyEvent], notes: RecordedSteps) -> tuple[str, ...]:
    log = [CREATED, *events]
    return fault_outcomes(log, summarise(status_from_events(log), logs="", now=1000), notes).problems


def both(**attempts: tuple[int, int]) -> RecordedSteps:
    """The same notes of two ranks: `a0=(1, 7)` is steps 1 to 7 in attempt 0."""
    noted = {int(name[1:]): set(range(first, last + 1)) for name, (first, last) in attempts.items()}
    return {0: noted, 1: noted}


def test_redone_steps_are_no_problem() -> None:
    assert problems([*steps(0, 1, 7), *steps(1, 6, 9)], both(a0=(1, 7), a1=(6, 9))) == ()


def test_steps_that_share_a_line_are_all_there() -> None:
    assert problems([step(1), replace(step(4), steps=3), step(5)], both(a0=(1, 5))) == ()
    (problem,) = problems([step(1), replace(step(4), steps=4)], both(a0=(1, 4)))
    assert problem == "in attempt 0 step 1 follows step 1"


def test_last_words_of_a_life_may_be_missing_where_the_ranks_did_them() -> None:
    assert problems([*steps(0, 1, 3), *steps(1, 6, 9)], both(a0=(1, 5), a1=(6, 9))) == ()


def test_step_that_nobody_did_is_lost_and_told_once() -> None:
    (problem,) = problems([*steps(0, 1, 3), *steps(1, 6, 9), step(10, 2)], both(a0=(1, 4), a1=(6, 9), a2=(10, 10)))
    assert problem == "attempt 1 continues with step 6, without step 5"


def test_step_of_which_one_rank_did_not_live_to_tell_is_done() -> None:
    notes = {0: {0: {1, 2, 3}, 1: {4}}, 1: {0: {1, 2}, 1: {4}}}
    assert problems([*steps(0, 1, 3), step(4, 1)], notes) == ()


def test_step_that_was_rolled_back_and_not_done_again_is_lost() -> None:
    (problem,) = problems([*steps(0, 1, 9), *steps(1, 4, 5), *steps(2, 8, 9)], both(a0=(1, 9), a1=(4, 5), a2=(8, 9)))
    assert problem == "attempt 2 continues with step 8, without 2 steps from 6"


def test_commit_of_a_step_that_nobody_did_is_a_problem() -> None:
    (problem,) = problems(steps(0, 1, 3), both(a0=(1, 2)))
    assert problem == "attempt 0 committed step 3, which no rank finished"


def test_doubled_missing_and_late_steps_are_problems() -> None:
    assert problems([step(1), step(1)], {}) == ("in attempt 0 step 1 follows step 1",)
    assert len(problems([step(1), step(3)], both(a0=(1, 3)))) == 2
    assert problems([step(1), step(2, 1), step(2)], {}) == (
        "step 2 of attempt 0 was committed after attempt 1 had steps",
    )


def test_recoveries_are_timed_by_what_failed_and_counted_when_they_have_no_end() -> None:
    lost = RecoveryDecided(
        at=5, replica=0, attempt=0, action="restart", failed_at=4, finding=Finding(code="node-lost", what="")
    )
    drill = FaultRequested(at=120, target=FaultTarget.CONTROLLER, index=0, action=FaultAction.KILL)
    back = ControllerStarted(at=121.5, pid=1, incarnation="b")
    again = RecoveryDecided(
        at=130, replica=0, attempt=1, action="restart", failed_at=129, finding=Finding(code="rank-hung", what="")
    )
    log: list[AnyEvent] = [CREATED, step(1), lost, step(2, 1), drill, back, again]
    came = fault_outcomes(log, summarise(status_from_events(log), logs="", now=1000), {})
    assert came.requested == {"kill controller": 1}
    assert came.recovered_s == {"node-lost": [98], "controller": [1.5]}
    assert came.unrecovered == 1
