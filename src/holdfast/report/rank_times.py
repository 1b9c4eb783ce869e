"""How long ranks took for a step over a whole run, and which were the slowest. Pure."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from holdfast.events import StepTimesCompared
from holdfast.report.formatting import count, percentage

MAX_SHOWN = 10
"""Slow ranks that are shown."""


class SlowRank(Struct, frozen=True, kw_only=True):
    """A rank that was the slowest of its replica."""

    replica: int
    rank: int
    times: int
    """Comparisons in which it was."""
    compared: int
    """Comparisons of its replica."""
    lag: float
    """By which share of the median its own time exceeded it then; the mean."""
    phase: str
    """Where it mostly took longer than the others."""


class RankTimes(Struct, frozen=True, kw_only=True):
    """Means over all comparisons of a run."""

    step_p50_s: float
    step_p99_s: float
    own_p50_s: float
    own_p99_s: float
    slowest: tuple[SlowRank, ...]
    """Those that were the slowest most often, first."""


class RankTimesRecorder:
    """Collects comparisons; needs memory for each rank that was ever the slowest."""

    def __init__(self) -> None:
        self._compared: Counter[int] = Counter()
        """By replica."""
        self._sums = [0.0] * 4
        self._lags: dict[tuple[int, int], float] = {}
        """By replica and rank, the sum."""
        self._phases: dict[tuple[int, int], Counter[str]] = {}

    def add(self, event: StepTimesCompared) -> None:
        """Add the next comparison."""
        self._compared[event.replica] += 1
        given = event.step_p50_s, event.step_p99_s, event.own_p50_s, event.own_p99_s
        self._sums = [total + each for total, each in zip(self._sums, given, strict=True)]
        if event.ranks > 1 and event.slowest:
            slowest = event.slowest[0]
            which = event.replica, slowest.rank
            self._lags[which] = self._lags.get(which, 0.0) + event.lag_of(slowest)
            self._phases.setdefault(which, Counter())[slowest.phase] += 1

    @property
    def found(self) -> RankTimes | None:
        """What has been collected; None if no ranks were compared."""
        if not (comparisons := self._compared.total()):
            return None
        step_p50_s, step_p99_s, own_p50_s, own_p99_s = (total / comparisons for total in self._sums)
        return RankTimes(
            step_p50_s=step_p50_s,
            step_p99_s=step_p99_s,
            own_p50_s=own_p50_s,
            own_p99_s=own_p99_s,
            slowest=self._slowest(),
        )

    def _slowest(self) -> tuple[SlowRank, ...]:
        ranks = [
            SlowRank(
                replica=replica,
                rank=rank,
                times=(times := phases.total()),
                compared=self._compared[replica],
                lag=self._lags[replica, rank] / times,
                phase=phases.most_common(1)[0][0],
            )
            for (replica, rank), phases in self._phases.items()
        ]
        return tuple(sorted(ranks, key=lambda each: (-each.times, -each.lag))[:MAX_SHOWN])


def seconds_text(p50_s: float, p99_s: float) -> str:
    """Both, such as `0.251 s / 0.263 s`."""
    return f"{p50_s:.3g} s / {p99_s:.3g} s"


def rank_time_figures(times: RankTimes | None) -> dict[str, str]:
    """The figures by name; empty where no ranks were compared."""
    return {
        "step time p50 / p99 of ranks": seconds_text(times.step_p50_s, times.step_p99_s) if times else "",
        "own time p50 / p99 of ranks": seconds_text(times.own_p50_s, times.own_p99_s) if times else "",
    }


SLOW_RANK_HEAD = ("rank", "the slowest in", "over the median", "most in")


def slow_rank_rows(times: RankTimes) -> list[tuple[str, ...]]:
    """A row of each slow rank, under `SLOW_RANK_HEAD`."""
    return [
        (
            f"{each.rank} of replica {each.replica}" if each.replica else str(each.rank),
            f"{each.times:,} of {count(each.compared, 'comparison')}",
            percentage(each.lag),
            each.phase,
        )
        for each in times.slowest
    ]
