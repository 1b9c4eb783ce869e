"""Names the ranks for which the others wait in most of several dumps of a slow job; pure.

A slow job does not stand still: a single dump shows where each rank happens to be. After ByteRobust (SOSP 2025),
section 5, which takes five dumps of such a job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from holdfast.diagnose.stack_groups import StackVerdict
from holdfast.diagnose.wait_axes import Wait
from holdfast.job.parallel_layout import ParallelLayout

ROUNDS = 5
"""Dumps of a slow job."""
CHANCE = 0.01
"""Probability of naming some rank at which it counts as chance: ranks that take turns in being last."""


class RoundsVerdict(Struct, frozen=True, kw_only=True):
    """What several dumps show together."""

    verdict: StackVerdict
    """The groups of the last dump in which all suspects stand out, or of the last one; the suspects of all dumps."""
    rounds: int
    times: int = 0
    """Dumps in which the others waited for a suspect, for the one that is seen least often."""


def judge_rounds(
    rounds: Sequence[StackVerdict], layout: ParallelLayout | None = None, *, asked: int = 0
) -> RoundsVerdict:
    """Name the ranks that stand out in most dumps, and the smallest parallel group that covers them.

    Of `asked` dumps, those that are not complete name nobody.
    """
    asked = max(asked, len(rounds))
    flagged = [_waited_for(each) for each in rounds]
    count_of = Counter(rank for ranks in flagged for rank in ranks)
    ranks = sum(len(group.ranks) for group in rounds[-1].groups) + len(rounds[-1].missing)
    often = {rank for rank, times in count_of.items() if 2 * times > asked}
    rest = sum(times for rank, times in count_of.items() if rank not in often)
    named = {
        rank
        for rank in often
        if not _is_chance(count_of[rank], asked, ranks=ranks, rest=rest, others=ranks - len(often))
    }
    telling = next((number for number in reversed(range(len(rounds))) if named and named <= flagged[number]), -1)
    fits = layout is not None and all(rank < layout.world_size for rank in named)
    origin = layout.smallest_group(named) if layout is not None and named and fits else None
    return RoundsVerdict(
        verdict=replace(rounds[telling], suspects=tuple(sorted(named)), origin=origin),
        rounds=asked,
        times=min((count_of[rank] for rank in named), default=0),
    )


def _waited_for(one: StackVerdict) -> frozenset[int]:
    """The ranks for which most others wait in one dump; none while most compute."""
    waiting = bool(one.groups) and one.groups[0].waits_for is not Wait.NONE
    return frozenset(one.suspects if waiting else ())


def _is_chance(times: int, rounds: int, *, ranks: int, rest: int, others: int) -> bool:
    """Whether one of so many ranks would be last so often if each were as often as the others are."""
    share = (rest + 1) / (rounds * others + 2)
    tail = sum(math.comb(rounds, k) * share**k * (1 - share) ** (rounds - k) for k in range(times, rounds + 1))
    return ranks * tail >= CHANCE
