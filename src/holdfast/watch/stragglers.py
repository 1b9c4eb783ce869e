"""Detects ranks that take longer than the others, apart from the waiting that they cause. Pure.

Input are rounds: the times of all ranks of a replica over about the same steps. A rank's own time ends when its last
gradient is ready, before it waits for the others' gradients, so a slow rank does not lengthen the others' own times.
Time lost in communication is in no own time: there, a rank is late although its own time is as usual.

False alarms: none in an hour of steps of 0.25 s of eight ranks whose own times vary by 20 % from step to step. A rank
that is slower by design, such as one that alone writes samples to disk, is named: the others do wait for it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.protocol.phase_times import Phase, PhaseTimes


class Rule(NamedTuple):
    """How much slower a rank has to be, and for how long; both the mean and the median over the rounds."""

    steps: int
    share: float
    """Its own time beyond the median of the others', divided by that."""
    lost_s: float = 0.0
    """Seconds that these steps must have cost in all: chance disturbs short ones."""


RULES = (Rule(3, 0.30, lost_s=1.0), Rule(20, 0.08), Rule(200, 0.08))
"""The last finds what noise hides from the others."""
DEVIATIONS = 6.0
"""Standard errors that the mean must exceed: 1e-9 per test of normal noise, for 16,384 ranks by the hour."""
MIN_LOST_S = 0.001
"""Seconds per step that it must cost."""
REARM_SHARE, REARM_STEPS = 0.04, 20
"""A named rank may be named again once its share is below this over so many steps."""
USUAL_ROUNDS = 4
"""Rounds in a row of which the usual lateness of each rank is the mean."""
MAX_ROUNDS, NOISE_ROUNDS = 40, 6
"""Rounds that are kept of each rank, and the least of them from which noise is known; before, only a rank that is twice
as slow is named. Fewer would now and then show a busy host as a calm one."""
CONTENTION = 0.5
"""Where a rank's thread waits for a CPU, it shares caches and clock too: the part of its waits that excuses as much of
its own time. Waits are in no own time; on two busy cores, own times of equal ranks still differ by 6 % to 20 %.
A rank is late by the waits themselves as well."""

NOTICED = 0.5
"""Part of its lateness that the others must wait longer, at least: some of it passes while gradients are sent."""


class Straggler(NamedTuple):
    """A rank that is slower than the others."""

    rank: int
    phase: Phase
    """Where it loses most."""
    slowdown: float
    """Its own time divided by the median of the others'."""
    lost_s: float
    """Seconds per step that it takes longer in this phase than the median of the others."""
    others_s: float
    """The median of the others' own times."""
    first_step: int
    last_step: int
    loader: str = ""
    """What it waits for, where that is samples."""


class _Round(NamedTuple):
    steps: int
    share: float
    others_s: float
    excused: float = 0.0
    """What contention for CPUs may explain of the share."""


class _Series:
    """One rank's rounds, with hysteresis."""

    def __init__(self, offset: float) -> None:
        self.rounds: deque[_Round] = deque(maxlen=MAX_ROUNDS)
        self._offset = offset
        """Deviations of a round by which all shares may be wrong in the same direction."""
        self.is_named = False

    def add(self, one: _Round, noise: float) -> list[_Round]:
        """The rounds in which the rank was slower than a rule allows, unless it is named already."""
        self.rounds.append(one)
        if self.is_named:
            if statistics.fmean(each.share for each in self._newest(REARM_STEPS) or self.rounds) < REARM_SHARE:
                self.is_named = False
                self.rounds.clear()
            return []
        found = next((recent for rule in RULES if (recent := self._fulfilling(rule, noise))), list[_Round]())
        self.is_named = bool(found)
        return found

    def _fulfilling(self, rule: Rule, noise: float) -> list[_Round]:
        recent = self._newest(rule.steps)
        if not recent:
            return []
        shares = [each.share for each in recent]
        mean, steps = statistics.fmean(shares), sum(each.steps for each in recent)
        lost_s = sum(each.steps * each.share * each.others_s for each in recent)
        holds = (
            min(mean, statistics.median(shares)) >= rule.share + statistics.fmean(each.excused for each in recent)
            and mean >= DEVIATIONS * noise * (self._offset + 1 / math.sqrt(len(recent)))
            and lost_s >= max(rule.lost_s, steps * MIN_LOST_S)
        )
        return recent if holds else []

    def _newest(self, steps: int) -> list[_Round]:
        """The newest rounds that have so many steps together; empty if all have fewer."""
        found: list[_Round] = []
        left = steps
        for each in reversed(self.rounds):
            found.append(each)
            left -= each.steps
            if left <= 0:
                return found
        return []


class _Comparison:
    """Series of one quantity of all ranks."""

    def __init__(self, offset: float = 0.0) -> None:
        self._offset = offset
        self._series: dict[int, _Series] = {}
        self._noise: deque[float] = deque(maxlen=MAX_ROUNDS)
        """By round, the standard deviation of a rank's share from one round to the next."""

    @property
    def named(self) -> set[int]:
        """The ranks that are named and have not recovered."""
        return {rank for rank, each in self._series.items() if each.is_named}

    def add(self, rounds: dict[int, _Round]) -> dict[int, list[_Round]]:
        """The ranks that are named with this round, and the rounds that prove it."""
        series = {rank: self._series.setdefault(rank, _Series(self._offset)) for rank in rounds}
        changes = [abs(rounds[rank].share - each.rounds[-1].share) for rank, each in series.items() if each.rounds]
        if changes:
            # A difference has twice the variance; the median of its size is at 0.674 standard deviations.
            self._noise.append(statistics.median(changes) / (0.674 * math.sqrt(2)))
        noise = statistics.median(self._noise) if len(self._noise) >= NOISE_ROUNDS else 1 / DEVIATIONS
        return {rank: found for rank, each in series.items() if (found := each.add(rounds[rank], noise))}


class _Arrivals(NamedTuple):
    """When the ranks are ready for communication, or the mean of several rounds."""

    communication_s: float
    late_s: dict[int, float]
    """By rank, seconds after the median of the others."""


class StragglerDetector:
    """The ranks of a replica in one attempt."""

    def __init__(self) -> None:
        self._own = _Comparison()
        self._late = _Comparison(offset=1 / math.sqrt(USUAL_ROUNDS))
        self._arrivals: deque[_Arrivals] = deque(maxlen=USUAL_ROUNDS)
        self._usual: _Arrivals | None = None
        """The rounds with the least communication so far."""

    def add(self, times: Sequence[PhaseTimes]) -> list[Straggler]:
        """Add a round with the times of all ranks; the ranks that are named with it, the slowest first."""
        if len(times) < 2:
            return []
        by_rank = {each.rank: each for each in times}
        rounds = _rounds(times)
        found = [
            _straggler(by_rank[rank], times, _slowest_phase(by_rank[rank], times), proof)
            for rank, proof in self._own.add(rounds).items()
        ]
        if late := self._lateness(times, rounds):
            # The part of its lateness that its own time explains is subtracted, but only nearly.
            found += [
                _straggler(by_rank[rank], times, Phase.COMMUNICATION, proof)
                for rank, proof in self._late.add(late).items()
                if rank not in self._own.named
            ]
        return sorted(found, key=lambda each: -each.slowdown)

    def _lateness(self, times: Sequence[PhaseTimes], own: dict[int, _Round]) -> dict[int, _Round]:
        """How much later each rank is than usual, beyond its own time, as far as the others wait longer than usual.

        Clocks of several machines differ, so only a change counts; they drift, so only one that others notice.
        """
        if any(not each.arrived for each in times) or len({(each.first_step, each.last_step) for each in times}) > 1:
            return {}
        at = [each.arrived for each in times]
        late_s = {each.rank: each.arrived - _median_of_others(at, each.arrived) for each in times}
        communication_s = statistics.median(each.of(Phase.COMMUNICATION) for each in times)
        if self._arrivals and self._arrivals[-1].late_s.keys() != late_s.keys():
            self._arrivals.clear()
            self._usual = None
        self._arrivals.append(_Arrivals(communication_s, late_s))
        recent = _mean(self._arrivals)
        if len(self._arrivals) == USUAL_ROUNDS and (
            self._usual is None or recent.communication_s < self._usual.communication_s
        ):
            self._usual = recent
        if self._usual is None:
            return {}
        grown_s, usual = communication_s - self._usual.communication_s, self._usual.late_s
        waits_s = {each.rank: each.cpu_wait_s for each in times}
        return {
            rank: _Round(
                steps=one.steps,
                share=min(late_s[rank] - usual[rank] - max(0.0, one.share * one.others_s), grown_s / NOTICED)
                / one.others_s,
                others_s=one.others_s,
                excused=one.excused + waits_s[rank] / one.others_s,
            )
            for rank, one in own.items()
            if one.others_s > 0
        }


def _rounds(times: Sequence[PhaseTimes]) -> dict[int, _Round]:
    own = [each.own_s for each in times]
    others = {each.rank: _median_of_others(own, each.own_s) for each in times}
    return {each.rank: _round(each, others[each.rank]) for each in times}


def _round(one: PhaseTimes, others_s: float) -> _Round:
    if others_s <= 0:
        return _Round(one.steps, 0.0, others_s)
    return _Round(one.steps, one.own_s / others_s - 1, others_s, CONTENTION * one.cpu_wait_s / others_s)


def _mean(arrivals: Sequence[_Arrivals]) -> _Arrivals:
    return _Arrivals(
        statistics.fmean(each.communication_s for each in arrivals),
        {rank: statistics.fmean(each.late_s[rank] for each in arrivals) for rank in arrivals[0].late_s},
    )


def _slowest_phase(one: PhaseTimes, times: Sequence[PhaseTimes]) -> Phase:
    return max((each for each in Phase if each is not Phase.COMMUNICATION), key=lambda each: _lost_s(one, times, each))


def _lost_s(one: PhaseTimes, times: Sequence[PhaseTimes], phase: Phase) -> float:
    return one.of(phase) - statistics.median(each.of(phase) for each in times if each.rank != one.rank)


def _straggler(one: PhaseTimes, times: Sequence[PhaseTimes], phase: Phase, proof: Sequence[_Round]) -> Straggler:
    share, others_s = statistics.fmean(each.share for each in proof), proof[0].others_s
    return Straggler(
        rank=one.rank,
        phase=phase,
        slowdown=1 + share,
        lost_s=share * others_s if phase is Phase.COMMUNICATION else _lost_s(one, times, phase),
        others_s=others_s,
        first_step=one.last_step - sum(each.steps for each in proof) + 1,
        last_step=one.last_step,
        loader=one.loader if phase is Phase.DATA else "",
    )


def _median_of_others(values: Sequence[float], own: float) -> float:
    """The median of all values but one that is `own`."""
    ordered = sorted(values)
    ordered.remove(own)
    return statistics.median(ordered)
