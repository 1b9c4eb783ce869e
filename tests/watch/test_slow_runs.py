"""A run that becomes slower is named with what has grown; noise and single long steps are not."""

from __future__ import annotations

import random

from holdfast.watch.slow_runs import SlowRun, SlowRunDetector


def test_run_that_becomes_slower_is_named_once_with_what_has_grown() -> None:
    chance, detector, found = random.Random(1), SlowRunDetector(), list[SlowRun]()
    for step in range(1, 1000):
        data_s = 0.3 if 400 < step <= 700 else 0.1
        step_s = (0.9 + data_s) * chance.gauss(1.0, 0.02)
        slow = detector.add(step, step_s, {"data": data_s, "communication": 0.2 * chance.gauss(1.0, 0.02)})
        found += [slow] if slow else []
    (slow,) = found
    assert 400 < slow.first_step <= 421
    assert slow.last_step <= 480
    assert list(slow.lost) == ["data"]
    assert 1.15 < slow.step_s < 1.25
    assert 0.97 < slow.best_s < 1.03


def test_recovered_run_is_named_again_when_it_slows_again() -> None:
    detector = SlowRunDetector()
    slow = [step for step in range(1, 2000) if detector.add(step, 1.2 if step // 400 % 2 else 1.0, {})]
    assert [step // 400 for step in slow] == [1, 3]


def test_noise_and_single_long_steps_name_nothing() -> None:
    for seed in range(5):
        chance, detector = random.Random(seed), SlowRunDetector()
        for step in range(1, 40_000):
            step_s = max(0.1, chance.gauss(1.0, 0.2)) * (10.0 if step % 100 == 0 else 1.0)
            assert detector.add(step, step_s, {}) is None, (seed, step)
