"""When a silent rank counts as hung: by its own steps, and not by what is none."""

from __future__ import annotations

import math
import os
import time

import pytest

from holdfast.agent.vigil import AGAIN_S, QUEUE_LOOK_S, Pulse
from holdfast.events.rank import Doing
from holdfast.job.patience import AUTO_LONGEST_S, EARLY_MORE_S, EARLY_STEPS, FACTOR, Patience

AUTO = Patience(deadline_s="auto")


def at_work(*steps_s: float) -> Pulse:
    """A rank that has passed its first step and as many more, each of which took so long."""
    pulse = Pulse(os.getpid())
    pulse.passed(1)
    for number, took_s in enumerate(steps_s, 2):
        pulse.at = time.monotonic() - took_s
        pulse.passed(number)
    return pulse


def allowed_s(pulse: Pulse) -> float:
    return pulse.due(AUTO) - pulse.at


def test_auto_is_three_times_the_slowest_of_few_steps_and_three_quarters_of_a_second() -> None:
    assert allowed_s(at_work(2.0, 5.0, *[1.0] * EARLY_STEPS)) == pytest.approx(15.75, abs=0.5)


def test_auto_takes_no_notice_of_the_slowest_in_a_hundred() -> None:
    assert allowed_s(at_work(60.0, *[2.0] * 199)) == pytest.approx(6.75, abs=0.5)


def test_first_step_has_its_own_time_and_an_early_one_that_of_a_first_that_compiles_again() -> None:
    fresh = Pulse(os.getpid(), at=time.monotonic() - 20.0)
    assert allowed_s(fresh) == pytest.approx(AUTO_LONGEST_S)
    fresh.passed(1)
    for number in range(2, 2 + EARLY_STEPS):
        assert allowed_s(fresh) == pytest.approx(60.0 + EARLY_MORE_S, abs=0.5)
        fresh.at = time.monotonic() - 2.0
        fresh.passed(number)
    assert allowed_s(fresh) == pytest.approx(6.75, abs=0.5)


def test_early_step_that_compiled_longer_than_the_first_gives_the_next_as_long() -> None:
    assert allowed_s(at_work(40.0)) == pytest.approx(120.0 + EARLY_MORE_S, abs=0.5)
    assert allowed_s(at_work(300.0)) == pytest.approx(AUTO_LONGEST_S)


def test_what_comes_between_two_steps_has_its_own_time_and_counts_for_neither() -> None:
    pulse = at_work(*[2.0] * EARLY_STEPS)
    pulse.at = time.monotonic() - 100.0
    pulse.turned(Doing.ASIDE)
    assert allowed_s(pulse) == pytest.approx(AUTO_LONGEST_S)
    assert pulse.due(Patience(deadline_s=3.0)) - pulse.at == pytest.approx(3.0 * FACTOR)
    pulse.at = time.monotonic() - 100.0
    pulse.turned(Doing.STEPS)
    assert allowed_s(pulse) == pytest.approx(6.75, abs=0.5)
    pulse.at = time.monotonic() - 50.0
    pulse.passed(2 + EARLY_STEPS)
    assert allowed_s(pulse) == pytest.approx(6.75, abs=0.5)


def test_rank_that_hangs_is_reported_again_soon_and_later_as_rarely_as_it_may_be_silent() -> None:
    slow = Patience(deadline_s=60.0)
    pulse = at_work()
    pulse.hung = True
    pulse.reported_at = pulse.at + 61.0
    assert pulse.due(slow) - pulse.reported_at == pytest.approx(AGAIN_S)
    pulse.reported_at = pulse.at + 121.0
    assert pulse.due(slow) - pulse.reported_at == pytest.approx(60.0)


def test_rest_is_never_due_until_there_is_a_step_again() -> None:
    pulse = at_work(2.0)
    pulse.turned(Doing.REST)
    assert pulse.due(AUTO) == pulse.due(Patience(deadline_s=1.0)) == math.inf
    pulse.passed(3)
    assert pulse.due(Patience(deadline_s=1.0)) - pulse.at == pytest.approx(1.0)


def test_time_without_a_cpu_is_what_the_kernel_counts_since_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = {os.getpid(): 10.0}
    monkeypatch.setattr("holdfast.agent.vigil.queued_s", queued.__getitem__)
    pulse = at_work()
    queued[os.getpid()] = 14.5
    assert pulse.starved_s() == pytest.approx(4.5)
    pulse.queue_seen_at -= QUEUE_LOOK_S
    pulse.passed(2)
    assert pulse.starved_s() == 0.0
