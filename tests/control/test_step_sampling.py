"""Lines that stand for several steps: every step in exactly one, and every account the same."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.control import step_sampling
from holdfast.control.step_sampling import FULL_RATE_LINES, MAX_INTERVAL_S, StepSampler, merge_steps, min_interval_s
from holdfast.events import (
    AnyEvent,
    CheckpointCommitted,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    ShutdownDecided,
    StepCommitted,
)
from holdfast.events.controller_events import Outcome
from holdfast.findings import Finding
from holdfast.report.status_reducer import status_from_events

LOST = Finding(code="node-lost", what="node1 was lost")


def step(number: int, started: float, took_s: float, attempt: int = 0, checkpoint_s: float = 0.0) -> StepCommitted:
    ended = started + took_s
    return StepCommitted(
        at=ended, replica=0, attempt=attempt, step=number, started=started, ended=ended, checkpoint_s=checkpoint_s
    )


def run(attempts: list[int], took_s: list[float]) -> list[AnyEvent]:
    """A run in which each attempt does so many steps, the next one beginning five steps before its end."""
    events: list[AnyEvent] = [RunCreated(at=0.0, run="r", job={})]
    now, number, count = 1.0, 0, 0
    for attempt, steps in enumerate(attempts):
        if attempt > 0:
            events.append(
                RecoveryDecided(at=now + 2, replica=0, attempt=attempt - 1, action="", failed_at=now + 1, finding=LOST)
            )
            now, number = now + 10, max(0, number - 5)
        for _ in range(steps):
            number, count = number + 1, count + 1
            took = took_s[count % len(took_s)]
            events.append(step(number, now, took, attempt, checkpoint_s=took / 4 if number % 3 == 0 else 0.0))
            now += took + 0.125
    return events


def thinned(events: list[AnyEvent]) -> list[AnyEvent]:
    """What a controller would have written of them."""
    thin, lines, highest = StepSampler(), list[AnyEvent](), 0
    for event in events:
        new = (
            list[AnyEvent](thin.add(event, age_s=event.ended, highest=highest))
            if isinstance(event, StepCommitted)
            else [*thin.flush(), event]
        )
        highest = max([highest, *(line.step for line in new if isinstance(line, StepCommitted))])
        lines += new
    return [*lines, *thin.flush()]


def steps_of(events: list[AnyEvent]) -> list[tuple[int, int]]:
    lines = [event for event in events if isinstance(event, StepCommitted)]
    return [(line.attempt, number) for line in lines for number in range(line.first, line.step + 1)]


@given(
    attempts=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    took_s=st.lists(st.sampled_from([0.25, 0.5, 2.0, 40.0]), min_size=1, max_size=7),
    whole=st.sampled_from([0, 3, 20, 1000]),
)
def test_thinned_log_has_every_step_once_and_the_same_account(
    attempts: list[int], took_s: list[float], whole: int
) -> None:
    events = run(attempts, took_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_sampling, "FULL_RATE_LINES", max(1, whole))
        patch.setattr(step_sampling, "MAX_INTERVAL_S", 10.0)
        few = thinned(events)
    assert steps_of(few) == steps_of(events)
    end = max(event.at for event in events) + 1
    closed: list[AnyEvent] = [
        ShutdownDecided(at=end, outcome=Outcome.SUCCEEDED, reason="", exit_code=0),
        RunFinished(at=end + 1, outcome=Outcome.SUCCEEDED, exit_code=0),
    ]
    assert status_from_events([*few, *closed]).account() == status_from_events([*events, *closed]).account()
    last, before = status_from_events(few).leader, status_from_events(events).leader
    assert (last.step, last.attempt) == (before.step, before.attempt)


def test_steps_have_lines_of_their_own_until_there_are_many() -> None:
    events = run([FULL_RATE_LINES + 50], [0.5])
    lines = [event for event in thinned(events) if isinstance(event, StepCommitted)]
    assert all(line.steps == 1 for line in lines[:FULL_RATE_LINES])
    assert any(line.steps > 1 for line in lines[FULL_RATE_LINES:])


def test_first_step_of_an_attempt_has_a_line_of_its_own() -> None:
    thin = StepSampler(lines=10 * FULL_RATE_LINES, last_written=step(7, 0.0, 1.0))
    (line,) = thin.add(step(3, 1.0, 0.1, attempt=1), age_s=1e6, highest=7)
    assert (line.step, line.steps) == (3, 1)
    assert thin.add(step(4, 1.1, 0.1, attempt=1), age_s=1e6, highest=7) == []


def test_step_whose_clock_seems_to_go_back_is_written_at_once() -> None:
    thin = StepSampler(lines=10 * FULL_RATE_LINES, last_written=step(7, 100.0, 1.0))
    (line,) = thin.add(step(8, 50.0, 1.0), age_s=1e6, highest=7)
    assert line.step == 8


def test_speed_of_a_thinned_run_is_that_of_its_steps() -> None:
    events: list[AnyEvent] = [step(number, number * 2.0, 2.0) for number in range(1, 3 * FULL_RATE_LINES)]
    assert status_from_events(thinned(events)).leader.seconds_per_step == pytest.approx(2.0)


@pytest.mark.parametrize("step_s", [0.01, 0.3, 10.0])
def test_lines_of_a_month_are_no_more_than_the_schedule_says(step_s: float) -> None:
    """Counted without making the steps: the next line comes when its interval, or else a step, is over."""
    month_s, age_s, lines = 30 * 86400.0, 0.0, 0
    while age_s < month_s:
        age_s += max(step_s, min_interval_s(lines, age_s))
        lines += 1
    assert (
        lines
        <= FULL_RATE_LINES + FULL_RATE_LINES * math.log(MAX_INTERVAL_S * FULL_RATE_LINES) + month_s / MAX_INTERVAL_S
    )


def test_steps_that_wait_for_a_log_share_a_line_past_checkpoints_and_past_nothing_else() -> None:
    saved = CheckpointCommitted(at=3.0, node=0, replica=0, attempt=0, step=2, path="x")
    lost = RecoveryDecided(at=9.0, replica=0, attempt=0, action="", failed_at=9.0, finding=LOST)
    waiting: list[AnyEvent] = [step(1, 1.0, 1.0), step(2, 2.0, 1.0), saved, step(3, 3.0, 1.0), lost, step(4, 4.0, 1.0)]
    drawn: tuple[AnyEvent, ...] = ()
    for event in waiting:
        drawn = merge_steps((*drawn, event), lambda _: 0)
    first, *rest = drawn
    assert isinstance(first, StepCommitted)
    assert (first.first, first.step, first.started, first.ended) == (1, 3, 1.0, 4.0)
    assert rest == [saved, lost, step(4, 4.0, 1.0)]


def test_steps_done_again_share_no_waiting_line_with_new_ones() -> None:
    waiting = [step(number, float(number), 1.0) for number in range(1, 5)]
    drawn = merge_steps(waiting, lambda _: 2)
    assert [(line.first, line.step) for line in drawn if isinstance(line, StepCommitted)] == [(1, 2), (3, 4)]


def test_metrics_that_somebody_waits_for_are_written_at_once_and_kept_where_lines_are_drawn_together() -> None:
    split = msgspec.structs.replace(step(2, 2.0, 0.5), metrics={"profile_forward_s": 0.25, "loss": 2.0})
    thin = StepSampler()
    copied = msgspec.structs.replace(step(3, 3.0, 0.5), metrics={"peer_checkpoint_s": 0.25})
    taken = [thin.add(each, age_s=1e6, highest=0, low_space=True) for each in (step(1, 1.0, 0.5), split, copied)]
    assert [len(lines) for lines in taken] == [1, 1, 0]
    (line,) = merge_steps([split, step(3, 3.0, 0.5)], lambda _: 0)
    assert isinstance(line, StepCommitted)
    assert line.metrics == {"profile_forward_s": 0.25}


def test_log_with_little_space_has_few_lines_about_steps() -> None:
    thin = StepSampler()
    lines = [
        thin.add(step(number, float(number), 0.5), age_s=1.0, highest=0, low_space=True) for number in range(1, 29)
    ]
    assert [len(some) for some in lines] == [1] + [0] * 27
