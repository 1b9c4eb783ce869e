"""Decides which nodes measure each other, and which node or link explains what is slow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.events.probe_results import Located, PairRate

Pair = tuple[int, int]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gates:
    """What counts as slow."""

    share_of_median: float = 0.6
    """Of the median of the other pairs or devices. Holds while fewer than half of them are slow."""
    least_gb_s: float | None = None
    """Absolute floor of a pair, which also finds a fabric that is slow as a whole; None: there is no figure for it."""


def pair_rounds(count: int) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of disjoint pairs of nodes, log2(count) + 1 of them if there are as many; no two nodes meet twice.

    Of an odd number of nodes, one rests in each round.
    """
    if count < 2:
        return ()
    seats = count + count % 2
    return tuple(_round(each, count, seats) for each in range(min((count - 1).bit_length() + 1, seats - 1)))


def _round(number: int, count: int, seats: int) -> tuple[Pair, ...]:
    """A round-robin tournament's round by the circle method: one seat is fixed, the others move by one."""
    moving = seats - 1
    circle = [moving, *((number + each) % moving for each in range(moving))]
    opposite = (sorted((circle[each], circle[-1 - each])) for each in range(seats // 2))
    return tuple(sorted((low, high) for low, high in opposite if high < count))


def disjoint(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """The first of these pairs that have no node in common."""
    taken: set[int] = set()
    chosen: list[Pair] = []
    for pair in pairs:
        if taken.isdisjoint(pair):
            taken.update(pair)
            chosen.append(pair)
    return tuple(chosen)


def slow_or_failed(results: Iterable[PairRate], gates: Gates) -> dict[Pair, float | None]:
    """The pairs that are slow, with their rate, or failed, with None. The slowest lane is a pair's rate."""
    rates: dict[Pair, float | None] = {}
    for each in results:
        before = rates.get(each.nodes, each.gb_s)
        rates[each.nodes] = None if before is None or each.gb_s is None else min(before, each.gb_s)
    measured = {pair: rate for pair, rate in rates.items() if rate is not None}
    slow = below_median(measured, gates.share_of_median)
    slow |= {pair for pair, rate in measured.items() if rate < (gates.least_gb_s or 0.0)}
    return {pair: rate for pair, rate in rates.items() if rate is None or pair in slow}


def below_median(rates: Mapping[K, float], share: float) -> set[K]:
    """The keys whose rate is less than this share of the median of the other rates."""
    ordered = sorted(rates.values())
    return {key for key, rate in rates.items() if len(ordered) > 1 and rate < share * _median_without(ordered, rate)}


def _median_without(ordered: Sequence[float], rate: float) -> float:
    """The upper median of the other rates."""
    middle = (len(ordered) - 1) // 2
    return ordered[middle + (bisect_left(ordered, rate) <= middle)]


def locate(results: Collection[PairRate], gates: Gates, absent: Collection[int] = ()) -> Located:
    """Name the nodes that explain all slow or failed pairs; where only one pair of a node is, name the pair.

    A node is named if it is absent, or if at least two and more than half of its pairs are slow or failed.
    """
    bad = set(slow_or_failed(results, gates))
    pairs = {each.nodes for each in results}
    named = set(absent)
    bad, pairs = _without(bad, named), _without(pairs, named)
    if len(pairs) > 1 and bad == pairs:
        return Located(nodes=tuple(sorted(named)), none_good=True)
    while (worst := _worst(bad, pairs)) is not None:
        named.add(worst)
        bad, pairs = _without(bad, {worst}), _without(pairs, {worst})
    return Located(nodes=tuple(sorted(named)), pairs=tuple(sorted(bad)))


def _without(pairs: set[Pair], nodes: set[int]) -> set[Pair]:
    return {pair for pair in pairs if nodes.isdisjoint(pair)}


def _worst(bad: set[Pair], pairs: set[Pair]) -> int | None:
    """The node with the largest share of slow or failed pairs, if that is more than half, and more than one pair."""
    shares: list[tuple[float, int, int]] = []
    for node in {node for pair in bad for node in pair}:
        failed, all_of_it = (sum(node in pair for pair in some) for some in (bad, pairs))
        if failed > 1 and 2 * failed > all_of_it:
            shares.append((failed / all_of_it, failed, -node))
    return -max(shares)[2] if shares else None
