"""Detects ranks that wait for samples: for much of their steps, or once for much longer than usual. Pure.

False alarms: none in 10,000 rounds of waits that are on average a tenth of a step and vary by their own size. A run
whose ranks always wait for 30 % of a step is named once per attempt, which is no false alarm: its devices idle.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.protocol.phase_times import Phase, PhaseTimes

SHARE, STEPS = 0.30, 20
"""Share of each step that a rank waits for samples, and steps in a row of which that holds."""
REARM_SHARE = 0.15
"""Share below which a named rank may be named again."""
LONG_WAIT_S, TIMES_MEDIAN = 1.0, 10.0
"""Seconds, and times the rank's median wait, from which a single wait is named."""
MAX_ROUNDS, FIRST_ROUNDS = 16, 2
"""Rounds of which the median is taken, and the least of them: the first batch waits for loaders to start."""


class DataStall(NamedTuple):
    """A rank that waits for samples; of several, the longest wait."""

    rank: int
    loader: str
    wait_s: float
    """Seconds per step, or of the single wait."""
    step_s: float
    is_single: bool
    ranks: int
    """How many ranks wait so."""
    first_step: int
    last_step: int


class DataStallDetector:
    """The ranks of a replica in one attempt."""

    def __init__(self) -> None:
        self._waits: dict[int, deque[float]] = {}
        self._steps_above: dict[int, int] = {}
        self._named = False

    def add(self, times: Sequence[PhaseTimes], *, is_named: bool = False) -> DataStall | None:
        """Add a round with the times of all ranks; the stall that is named with it, if one is.

        With `is_named`, a rank is already named because it waits for samples longer than the others.
        """
        self._named = self._named or is_named
        longest = [each for each in times if self._is_long(each)]
        for each in times:
            above = each.of(Phase.DATA) >= SHARE * each.step_s > 0
            self._steps_above[each.rank] = self._steps_above.get(each.rank, 0) + each.steps if above else 0
            self._waits.setdefault(each.rank, deque(maxlen=MAX_ROUNDS)).append(each.of(Phase.DATA))
        waiting = [each for each in times if self._steps_above[each.rank] >= STEPS]
        if self._named:
            self._named = any(each.of(Phase.DATA) >= REARM_SHARE * each.step_s for each in times)
        elif waiting:
            self._named = True
            worst = max(waiting, key=lambda each: each.of(Phase.DATA))
            first_step = worst.last_step - self._steps_above[worst.rank] + 1
            return _stall(worst, worst.of(Phase.DATA), len(waiting), first_step=first_step)
        if longest:
            worst = max(longest, key=lambda each: each.longest_wait_s)
            return _stall(worst, worst.longest_wait_s, len(longest), first_step=worst.first_step, is_single=True)
        return None

    def _is_long(self, one: PhaseTimes) -> bool:
        waits = self._waits.get(one.rank, ())
        if len(waits) < FIRST_ROUNDS or one.longest_wait_s < LONG_WAIT_S:
            return False
        return one.longest_wait_s > TIMES_MEDIAN * statistics.median(waits)


def _stall(one: PhaseTimes, wait_s: float, ranks: int, *, first_step: int, is_single: bool = False) -> DataStall:
    return DataStall(
        rank=one.rank,
        loader=one.loader,
        wait_s=wait_s,
        step_s=one.step_s,
        is_single=is_single,
        ranks=ranks,
        first_step=first_step,
        last_step=one.last_step,
    )
