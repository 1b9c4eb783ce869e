"""The step times of ranks are compared at a rate, and in lines of a size, that keep the log of a large run small."""

from __future__ import annotations

import pytest
from tests.control.test_run_watch import progress, times

from holdfast.control.run_watch import RunWatch
from holdfast.control.step_times import MAX_SLOWEST, compare_step_times, interval_s
from holdfast.events import StepTimesCompared
from holdfast.events.log import decode_line, encode_line
from holdfast.protocol.phase_times import Phase, PhaseTimes


def compared(count: int) -> StepTimesCompared:
    """Of ranks of which each takes a thousandth longer in its backward pass than the one before."""
    rows = [times(rank, 4_000_004, backward=0.001 * rank) for rank in range(count)]
    return compare_step_times(rows, replica=0, attempt=0, at=1_700_000_000.125)


def test_slowest_rank_is_named_with_the_phase_in_which_it_loses_most() -> None:
    rows = [times(0, 9), times(1, 9, data=0.2, forward=0.1), times(2, 9, communication=0.5)]
    event = compare_step_times(rows, replica=0, attempt=2, at=1.0)
    assert (event.first_step, event.last_step, event.ranks, event.attempt) == (5, 9, 3, 2)
    slowest, *others = event.slowest
    assert (slowest.rank, slowest.phase, slowest.beyond_s) == (1, "data", 0.2)
    assert event.lag_of(slowest) == pytest.approx(0.3)
    assert [event.lag_of(each) for each in others] == [0.0, 0.0]  # a rank that waits for others is not slow
    assert (event.step_p50_s, event.step_p99_s) == (1.31, 1.51)
    assert (event.own_p50_s, event.own_p99_s) == (1.0, 1.3)
    assert event.phases_s["forward"] == 0.3


def test_line_of_16384_ranks_is_short_and_names_the_slowest() -> None:
    event = compared(16_384)
    line = encode_line(event)
    assert len(line) < 1700
    assert decode_line(line) == event
    assert [each.rank for each in event.slowest] == [16_383 - place for place in range(MAX_SLOWEST)]
    assert event.own_p50_s < event.own_p99_s < event.slowest[-1].own_s


def test_month_of_16384_ranks_has_a_log_line_each_two_minutes() -> None:
    lines, at = 0, 0.0
    while at < 30 * 86400:
        at += interval_s(at)
        lines += 1
    assert lines * len(encode_line(compared(16_384))) < 40 << 20


def test_comparisons_of_an_attempt_become_rare_and_start_again_with_the_next() -> None:
    watch, found = RunWatch(), list[float]()
    for attempt, began in ((0, 0.0), (1, 1000.0)):
        for number in range(600):
            at = began + number
            rows = [times(rank, 5 * number + 4) for rank in (0, 1)]
            events = watch.add_phases(progress(0, *rows, attempt=attempt), at)
            found += [each.at for each in events if isinstance(each, StepTimesCompared)]
    first = [at for at in found if at < 1000]
    assert [at - 1000 for at in found if at >= 1000] == first
    assert first[:4] == [2, 4, 6, 8]
    assert len(first) < 30
    assert first[-1] - first[-2] > 60


def test_times_of_ranks_without_any_work_are_compared() -> None:
    rows = [PhaseTimes(rank=rank, last_step=4, phases=(0.0,) * len(Phase)) for rank in (0, 1)]
    event = compare_step_times(rows, replica=0, attempt=0, at=0.0)
    assert event.lag_of(event.slowest[0]) == 0.0
