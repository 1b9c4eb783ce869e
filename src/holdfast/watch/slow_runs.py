"""Detects that a run as a whole is slower than it was, and ranks what may be the cause. Pure.

A run's best stable level is its fastest stretch of three windows of steps that agree. The median of a window ignores
steps with a checkpoint or an evaluation, unless every other step has one.

False alarms: none in 200,000 steps whose durations vary by 20 %, with every hundredth step ten times as long.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

WINDOW, WINDOWS = 20, 3
"""Steps of which a median is taken, and medians that must agree on a level or on its loss."""
AGREEMENT = 0.10
"""Share by which the medians of a stable level may differ."""
SLOW = 0.90
"""Share of the best stable level below which a run is slow."""
REARM = 0.95
"""Share of the best level from which a run that is named counts as recovered."""
DEVIATIONS, NOISE_WINDOWS = 6.0, 64
"""Standard deviations of a window's median by which it must be slower, and the windows from which they are known."""
MIN_GROWTH = 0.1
"""Share of the lost time that a cause must explain to be listed."""


class SlowRun(NamedTuple):
    """A run that has become slower."""

    step_s: float
    best_s: float
    first_step: int
    last_step: int
    lost: Mapping[str, float]
    """Seconds per step by part of the step that has become longer, the longest first."""


class _Window(NamedTuple):
    last_step: int
    step_s: float
    parts: Mapping[str, float]


class SlowRunDetector:
    """One replica with one number of ranks."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._parts: dict[str, list[float]] = {}
        self._windows: deque[_Window] = deque(maxlen=WINDOWS)
        self._changes: deque[float] = deque(maxlen=NOISE_WINDOWS)
        """Differences of successive medians."""
        self._best: _Window | None = None
        self._named = False

    def add(self, step: int, step_s: float, parts: Mapping[str, float]) -> SlowRun | None:
        """Add a step and the seconds of its known parts; returns how slow the run is once it has become slow."""
        self._steps.append(step_s)
        for name, seconds in parts.items():
            self._parts.setdefault(name, []).append(seconds)
        if len(self._steps) < WINDOW:
            return None
        window = _Window(step, statistics.median(self._steps), {k: statistics.fmean(v) for k, v in self._parts.items()})
        if self._windows:
            self._changes.append(abs(window.step_s - self._windows[-1].step_s))
        self._windows.append(window)
        self._steps, self._parts = [], {}
        return self._judge() if len(self._windows) == WINDOWS else None

    def restart(self) -> None:
        """Drop the steps since the last window: an attempt has ended."""
        self._steps, self._parts = [], {}
        self._windows.clear()

    def _judge(self) -> SlowRun | None:
        times = [each.step_s for each in self._windows]
        level = max(self._windows, key=lambda each: each.step_s)
        if max(times) <= min(times) * (1 + AGREEMENT) and (self._best is None or level.step_s < self._best.step_s):
            self._best = level
        if self._best is None:
            return None
        best_s, slow = self._best.step_s, min(times)
        if self._named:
            self._named = statistics.median(times) > best_s / REARM
            return None
        # A difference has twice the variance; the median of its size is at 0.674 standard deviations.
        noise_s = statistics.median(self._changes) / (0.674 * math.sqrt(2))
        if slow <= best_s / SLOW or statistics.median(times) <= best_s + DEVIATIONS * noise_s:
            return None
        self._named = True
        step_s = statistics.median(times)
        return SlowRun(
            step_s=step_s,
            best_s=best_s,
            first_step=self._windows[0].last_step - WINDOW + 1,
            last_step=self._windows[-1].last_step,
            lost=_grown(self._windows[-1].parts, self._best.parts, least=MIN_GROWTH * (step_s - best_s)),
        )


def _grown(now: Mapping[str, float], before: Mapping[str, float], *, least: float) -> Mapping[str, float]:
    grown = {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}
    ordered = sorted(grown.items(), key=lambda pair: -pair[1])
    return {name: seconds for name, seconds in ordered if seconds >= least}
