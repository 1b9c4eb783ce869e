"""Compares how long the ranks of a replica take for a step, at a rate that keeps the log small. Pure.

An attempt of a month has 21,600 such events of at most 1.3 KiB, whatever the number of its ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from holdfast.events import RankStepTime, StepTimesCompared
from holdfast.protocol.phase_times import Phase, PhaseTimes

MAX_SLOWEST = 32
"""Ranks that an event names."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 2.0, 120.0
"""Least and most seconds between two events; in between it is a fifth of the attempt's age."""
_OWN_PHASES = tuple(phase for phase in Phase if phase is not Phase.COMMUNICATION)


def interval_s(age_s: float) -> float:
    """Seconds after which an attempt of this age gets its next event."""
    return min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, age_s / 5))


def compare_step_times(times: Sequence[PhaseTimes], *, replica: int, attempt: int, at: float) -> StepTimesCompared:
    """Compare the times of all ranks of a replica, of which there is at least one."""
    medians = {phase: statistics.median(each.of(phase) for each in times) for phase in Phase}
    own = sorted(each.own_s for each in times)
    whole = sorted(each.step_s for each in times)
    slowest = sorted(times, key=lambda each: -each.own_s)[:MAX_SLOWEST]
    return StepTimesCompared(
        at=at,
        replica=replica,
        attempt=attempt,
        first_step=min(each.first_step for each in times),
        last_step=max(each.last_step for each in times),
        ranks=len(times),
        step_p50_s=_short(statistics.median(whole)),
        step_p99_s=_short(_p99(whole)),
        own_p50_s=_short(statistics.median(own)),
        own_p99_s=_short(_p99(own)),
        phases_s={phase.value: _short(seconds) for phase, seconds in medians.items()},
        slowest=tuple(_rank_time(each, medians) for each in slowest),
    )


def _rank_time(one: PhaseTimes, medians: dict[Phase, float]) -> RankStepTime:
    phase = max(_OWN_PHASES, key=lambda each: one.of(each) - medians[each])
    return RankStepTime(one.rank, _short(one.own_s), phase.value, _short(one.of(phase) - medians[phase]))


def _p99(ordered: Sequence[float]) -> float:
    """The value that 99 % do not exceed; of fewer than 100, the largest."""
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def _short(seconds: float) -> float:
    """Four digits: the log keeps the shortest text of a number."""
    return float(f"{seconds:.4g}")
