"""Detects memory that grows until none is left, and how soon that is. Pure.

A run's memory grows at its start, and caches fill: so growth counts only if every part of the window has grown, it has
used a quarter of what was free, and it would not end before the rest is used if it slowed down as it has so far.
Windows of several lengths are kept, so a leak over days is found as well as one over seconds.

False alarms: none for memory that approaches a level, that grows steadily to 24 % of what is free and then stops, that
rises and falls by as much, or that walks at random, in 100 generated series of each.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

HORIZON_S = 3600.0
"""Seconds left below which growth is named."""
SEEN_SHARE = 0.25
"""Share of the memory that was free at the start of the window which must be used since."""
MIN_SAMPLES, MAX_SAMPLES = 16, 32
"""Samples of a window."""
WINDOWS, FACTOR = 9, 4
"""Windows that are kept, each with every fourth sample of the last: of 16 s to 12 days, with a sample each 0.5 s."""
FREED = 0.75
"""Share of the memory in use when growth was named below which it may be named again."""
BLOCKS = 8
"""Parts of the window, each of whose minima must exceed the last one's."""


class Growth(NamedTuple):
    """Memory that will run out."""

    bytes_per_s: float
    used: float
    free: float
    left_s: float
    window_s: float


class _Sample(NamedTuple):
    at: float
    used: float
    free: float


class MemoryGrowthDetector:
    """The memory of one process, or of one device."""

    def __init__(self) -> None:
        self._windows = [deque[_Sample](maxlen=MAX_SAMPLES) for _ in range(WINDOWS)]
        self._count = 0
        self._named_at = math.inf
        """Bytes in use when it was named."""

    def add(self, at: float, *, used: float, free: float) -> Growth | None:
        """Add what it uses and what remains to its limit, in bytes; returns growth that has to be named."""
        if used < FREED * self._named_at < math.inf:
            self._named_at = math.inf
        sample, growth = _Sample(at, used, free), None
        for level, window in enumerate(self._windows):
            if self._count % FACTOR**level:
                break
            window.append(sample)
            growth = growth or _growth(list(window))
        self._count += 1
        if growth is None or self._named_at < math.inf:
            return None
        self._named_at = used
        return growth


def _growth(samples: Sequence[_Sample]) -> Growth | None:
    if len(samples) < MIN_SAMPLES:
        return None
    first, last = samples[0], samples[-1]
    grown = last.used - first.used
    if grown < SEEN_SHARE * first.free or not _every_part_grows(samples):
        return None
    middle = len(samples) // 2
    earlier, later = _slope(samples[: middle + 1]), _slope(samples[middle:])
    if later <= 0 or _still_to_come(earlier, later, last.used - samples[middle].used) < last.free:
        return None
    left_s = last.free / later
    if left_s > HORIZON_S:
        return None
    return Growth(later, last.used, last.free, left_s, last.at - first.at)


def _still_to_come(earlier: float, later: float, grown: float) -> float:
    """Bytes that follow if each half window grows by the same share of the one before it."""
    share = later / earlier if earlier > 0 else 1.0
    return grown * share / (1 - share) if share < 1 else math.inf


def _every_part_grows(samples: Sequence[_Sample]) -> bool:
    size = len(samples) / BLOCKS
    lowest = [min(each.used for each in samples[int(n * size) : int((n + 1) * size)]) for n in range(BLOCKS)]
    return all(a < b for a, b in pairwise(lowest))


def _slope(samples: Sequence[_Sample]) -> float:
    """The median slope of sample pairs half the samples apart (Theil and Sen, thinned out)."""
    half = len(samples) // 2
    pairs = zip(samples, samples[half:], strict=False)
    return statistics.median((b.used - a.used) / (b.at - a.at) for a, b in pairs if b.at > a.at)
