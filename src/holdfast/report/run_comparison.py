"""Compares runs: what their jobs differ in, and whether their steps differ by more than chance. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple, cast

from holdfast.report.run_record import Quantity, RunRecord

RESAMPLES = 400
TAIL = 0.025
"""On each side of the interval, which so holds 95 of 100 resamples."""
FEWEST_POINTS = 8
"""Points of a run's curve, below which nothing is said of its steps."""
WARM_UP_SHARE = 0.1
"""First part of a curve that is left out: compilation, caches."""


class Difference(NamedTuple):
    """A field of the job that differs between runs."""

    field: str
    values: tuple[str, ...]
    """One for each run; empty where the job does not have it."""


class Ratio(NamedTuple):
    """How long a step takes, relative to the first run."""

    value: float
    low: float
    high: float
    floor_low: float
    """The same statistic between two halves of the first run: what chance does."""
    floor_high: float

    def __str__(self) -> str:
        return f"{self.verdict} ({self.value:.3f} [{self.low:.3f}, {self.high:.3f}])"

    @property
    def verdict(self) -> str:
        """In words."""
        if self.low <= self.floor_high and self.high >= self.floor_low:
            return "no difference beyond chance"
        return f"{abs(1 - self.value):.1%} {'slower' if self.value > 1 else 'faster'}"


def job_differences(records: Sequence[RunRecord]) -> list[Difference]:
    """The fields in which the jobs differ, by their path."""
    flat = [dict(_fields(record.job)) for record in records]
    names = sorted({name for one in flat for name in one})
    found = [Difference(name, tuple(one.get(name, "") for one in flat)) for name in names]
    return [each for each in found if len(set(each.values)) > 1]


def _fields(value: object, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        inner = cast("dict[str, object]", value)
        return [each for name, one in inner.items() for each in _fields(one, f"{path}.{name}" if path else name)]
    if isinstance(value, list):
        return [(path, " ".join(map(str, cast("list[object]", value))))]
    return [(path, str(cast("object", value)))]


def step_time_ratio(first: RunRecord, other: RunRecord) -> Ratio | None:
    """The ratio of the median step times; None if either has too few steps."""
    base, compared = _step_times(first), _step_times(other)
    if min(len(base), len(compared)) < FEWEST_POINTS:
        return None
    low, high = _interval(base, compared)
    floor_low, floor_high = _interval(base[::2], base[1::2])
    return Ratio(statistics.median(compared) / statistics.median(base), low, high, floor_low, floor_high)


def _step_times(record: RunRecord) -> list[float]:
    points = next(iter(record.curves.values()), ())
    found = [value for point in points if (value := point.of(Quantity.STEP_S)) is not None and value > 0]
    return found[int(WARM_UP_SHARE * len(found)) :]


def _interval(base: Sequence[float], compared: Sequence[float]) -> tuple[float, float]:
    """The interval of the ratio of medians over resamples; the same for the same input."""
    chance = random.Random(0)
    ratios = sorted(_resampled(compared, chance) / _resampled(base, chance) for _ in range(RESAMPLES))
    return ratios[int(TAIL * RESAMPLES)], ratios[-1 - int(TAIL * RESAMPLES)]


def _resampled(values: Sequence[float], chance: random.Random) -> float:
    return statistics.median(chance.choices(values, k=len(values)))
