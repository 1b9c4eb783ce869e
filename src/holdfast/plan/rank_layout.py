"""Chooses nodes of a topology for a job, and the order of its ranks; predicts what crosses each level of the network.

Nodes stand in a tree of domains, such as zone, block and rack, whose lowest level is the fast one: a rack, or an NVLink
domain. The choice takes the lowest domain that has room, and in it the fewest domains of each level, highest level
first. Groups of tensor parallelism never leave a lowest domain. Pure.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from operator import ne
from statistics import fmean

from msgspec import Struct

from holdfast.plan.layout import Layout

MAX_VISITS = 12_000
"""Lowest domains in all sets of domains that are compared for a choice."""
RANDOM_ORDERS = 5
"""Random placements of which the comparison is the mean."""


class Topology(Struct, frozen=True, dict=True):
    """Nodes with the domain of each at every level, highest level first; domains are numbered within their level."""

    levels: tuple[str, ...]
    nodes: tuple[str, ...]
    domains: tuple[tuple[int, ...], ...]
    """Of each level, the domain of each node."""

    @cached_property
    def leaves(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each lowest domain, neighbours next to one another."""
        of_leaf: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for node, path in enumerate(zip(*self.domains, strict=True)):
            of_leaf[path].append(node)
        return tuple(tuple(of_leaf[path]) for path in sorted(of_leaf))

    @cached_property
    def leaf_domains(self) -> tuple[tuple[int, ...], ...]:
        """Of each level, the domain of each lowest domain."""
        return tuple(tuple(domains[nodes[0]] for nodes in self.leaves) for domains in self.domains)


def topology(labels: Mapping[str, Mapping[str, str]], levels: Sequence[str]) -> Topology:
    """The tree of nodes by their labels; a domain is identified by its name and those of all domains around it.

    Raises KeyError if a node lacks a label.
    """
    domains: list[tuple[int, ...]] = []
    around: list[tuple[str, ...]] = [()] * len(labels)
    for level in levels:
        around = [(*path, each[level]) for path, each in zip(around, labels.values(), strict=True)]
        numbers = {path: number for number, path in enumerate(sorted({*around}))}
        domains.append(tuple(numbers[path] for path in around))
    return Topology(levels=tuple(levels), nodes=tuple(labels), domains=tuple(domains))


def choose_nodes(tree: Topology, count: int, *, group: int = 1) -> tuple[int, ...] | None:
    """The nodes for a job of `count` nodes, neighbours next to one another; None if there is no room.

    `group` nodes in a row share a lowest domain.
    """
    wanted = -(-count // group)
    room = [len(nodes) // group for nodes in tree.leaves]
    if sum(room) < wanted:
        return None
    lowest = len(tree.levels) - 1
    taken = next((found for level in range(lowest, -1, -1) if (found := _in_one(tree, room, wanted, level))), None)
    best = taken or _narrowed(tree, range(len(room)), room, wanted, 0, MAX_VISITS)[1]
    return _nodes_in(tree, best, room, wanted * group, group)


def _in_one(tree: Topology, room: Sequence[int], wanted: int, level: int) -> list[int]:
    """The leaves in one domain of this level; empty if none has room."""
    domains = tree.leaf_domains[level]
    rooms = [0] * (max(domains) + 1)
    for domain, free in zip(domains, room, strict=True):
        rooms[domain] += free
    fitting = {domain for domain, free in enumerate(rooms) if free >= wanted}
    if not fitting:
        return []
    if level == len(tree.levels) - 1:
        return [min((leaf for leaf, free in enumerate(room) if free >= wanted), key=room.__getitem__)]
    parts = _by_domain(tree, (leaf for leaf, domain in enumerate(domains) if domain in fitting), level)
    budget = MAX_VISITS // len(parts)
    return min(_narrowed(tree, leaves, room, wanted, level + 1, budget) for leaves in parts)[1]


def _by_domain(tree: Topology, leaves: Iterable[int], level: int) -> list[list[int]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    domains = tree.leaf_domains[level]
    for leaf in leaves:
        found[domains[leaf]].append(leaf)
    return list(found.values())


def _narrowed(
    tree: Topology, leaves: Sequence[int], room: Sequence[int], wanted: int, level: int, budget: int
) -> tuple[tuple[int, ...], list[int]]:
    """The leaves in the fewest domains of this level and of each below, with these numbers and the leaves' room.

    Sets of domains are compared if they have at most `budget` leaves in all; else the largest domains are taken.
    """
    if level == len(tree.levels) - 1:
        chosen = [leaves[place] for place in _fewest([room[leaf] for leaf in leaves], wanted)]
        return (len(chosen), sum(room[leaf] for leaf in chosen)), chosen
    parts = _by_domain(tree, (leaf for leaf in leaves if room[leaf]), level)
    rooms = [sum(room[leaf] for leaf in part) for part in parts]
    fewest = _fewest(rooms, wanted)
    choices: Iterable[Sequence[int]] = [fewest]
    number = math.comb(len(parts), len(fewest))
    if number * len(leaves) <= budget:
        choices = combinations(range(len(parts)), len(fewest))
    return min(
        ((len(fewest), *numbers), chosen)
        for taken in choices
        if sum(rooms[part] for part in taken) >= wanted
        for below in ([leaf for part in taken for leaf in parts[part]],)
        for numbers, chosen in (_narrowed(tree, below, room, wanted, level + 1, budget // number),)
    )


def _fewest(rooms: Sequence[int], wanted: int) -> list[int]:
    """The fewest parts with so much room: the largest, and as the last one the smallest that suffices."""
    by_room = sorted(range(len(rooms)), key=lambda part: -rooms[part])
    taken: list[int] = []
    for place, part in enumerate(by_room):
        if rooms[part] >= wanted:
            enough = [each for each in by_room[place:] if rooms[each] >= wanted]
            return [*taken, min(enough, key=lambda each: rooms[each])]
        taken.append(part)
        wanted -= rooms[part]
    raise ValueError("there is too little room")


def _nodes_in(tree: Topology, leaves: Sequence[int], room: Sequence[int], count: int, group: int) -> tuple[int, ...]:
    """So many nodes of these leaves, along the tree; the emptiest leaf gives those that are left over."""
    spare = sum(room[leaf] for leaf in leaves) * group - count
    partly = min(leaves, key=room.__getitem__)
    chosen: list[int] = []
    for leaf in sorted(leaves):
        chosen += tree.leaves[leaf][: room[leaf] * group - (spare if leaf == partly else 0)]
    return tuple(chosen)


class RankGrid(Struct, frozen=True, kw_only=True):
    """How ranks of a job lie on its nodes, in the order of a job's `parallel`: `tp`, `cp`, `dp`, `pp`."""

    layout: Layout
    per_node: int

    @property
    def group(self) -> int:
        """Nodes of a tensor-parallel group."""
        return max(1, self.layout.tp // self.per_node)

    @property
    def nodes(self) -> int:
        return self.layout.gpus // self.per_node

    @property
    def stage_nodes(self) -> int:
        """Nodes of a pipeline stage; 1 if a node has several stages."""
        return max(1, self.nodes // self.layout.pp)

    @property
    def is_even(self) -> bool:
        """Whether groups and stages consist of whole nodes, or nodes of whole groups and stages."""
        layout, stage = self.layout, self.layout.gpus // self.layout.pp
        sizes = ((layout.tp, self.per_node), (stage, self.per_node), (layout.gpus, self.per_node))
        return all(large % small == 0 for large, small in (sorted(each, reverse=True) for each in sizes))


class RankLayout(Struct, frozen=True, kw_only=True):
    """Nodes in the order of ranks, and bytes that cross each level per step, compared with other orders."""

    nodes: tuple[str, ...]
    crossing: Mapping[str, float]
    """By level: bytes between different domains."""
    given: Mapping[str, float]
    """The same for the first nodes in the order in which the topology lists them."""
    at_random: Mapping[str, float]
    """The mean of random nodes in random order."""


def lay_out(tree: Topology, grid: RankGrid, sent_bytes: Mapping[str, float]) -> RankLayout | None:
    """The nodes of a job in the order of its ranks; None if there is no room.

    `sent_bytes` are those that a rank sends per step along `dp` and `tp`, and for `pp` those between two stages in both
    directions (plan/traffic.py).
    """
    best = ordered_nodes(tree, grid, sent_bytes)
    if best is None:
        return None
    dice, count = random.Random(0), grid.nodes
    every = range(len(tree.nodes))
    samples = [crossing(tree, dice.sample(every, count), grid, sent_bytes) for _ in range(RANDOM_ORDERS)]
    return RankLayout(
        nodes=tuple(tree.nodes[node] for node in best),
        crossing=crossing(tree, best, grid, sent_bytes),
        given=crossing(tree, range(count), grid, sent_bytes),
        at_random={level: fmean(sample[level] for sample in samples) for level in tree.levels},
    )


def ordered_nodes(tree: Topology, grid: RankGrid, sent_bytes: Mapping[str, float]) -> Sequence[int] | None:
    """The nodes in the order of ranks; None if there is no room.

    Either the nodes of a stage are neighbours or those of a pipeline, whichever sends less across the highest level; if
    that is equal, the next one decides.
    """
    chosen = choose_nodes(tree, grid.nodes, group=grid.group)
    if chosen is None:
        return None
    if grid.layout.pp == 1:
        return chosen
    orders: list[Sequence[int]] = [chosen, _pipelines_first(chosen, grid)]
    for domains in tree.domains:
        sent = [_cut_bytes(domains, order, grid, sent_bytes) for order in orders]
        orders = [order for order, each in zip(orders, sent, strict=True) if each == min(sent)]
        if len(orders) == 1:
            break
    return orders[0]


def _pipelines_first(chosen: Sequence[int], grid: RankGrid) -> Sequence[int]:
    """The order in which the stages of one pipeline are neighbours."""
    group, stages = grid.group, grid.nodes // grid.stage_nodes
    if group == 1:
        return [node for stage in range(stages) for node in chosen[stage::stages]]
    units = [chosen[start : start + group] for start in range(0, len(chosen), group)]
    return [node for stage in range(stages) for unit in units[stage::stages] for node in unit]


def crossing(tree: Topology, order: Sequence[int], grid: RankGrid, sent_bytes: Mapping[str, float]) -> dict[str, float]:
    """Bytes per step between different domains, by level; `order` has the nodes in the order of ranks."""
    pairs = zip(tree.levels, tree.domains, strict=True)
    return {level: _cut_bytes(domains, order, grid, sent_bytes) for level, domains in pairs}


def _cut_bytes(domains: Sequence[int], order: Sequence[int], grid: RankGrid, sent_bytes: Mapping[str, float]) -> float:
    layout, group, stage = grid.layout, grid.group, grid.stage_nodes
    of_rank = list(map(domains.__getitem__, order))
    cuts = {
        "dp": (_ring_cuts(of_rank, stage, group) if stage > group else 0) * (grid.per_node if group > 1 else layout.tp),
        "tp": _ring_cuts(of_rank, group, 1) if group > 1 else 0,
        "pp": sum(map(ne, of_rank, of_rank[stage:])) * min(grid.per_node, layout.gpus // layout.pp),
    }
    return sum(sent_bytes.get(axis, 0.0) * number for axis, number in cuts.items())


def _ring_cuts(of_rank: Sequence[int], length: int, stride: int) -> int:
    """Neighbours in rings that lie in different domains: each `length` nodes have rings with so large a stride."""
    cuts = 0
    for start in range(0, len(of_rank), length):
        ring = of_rank[start : start + length]
        cuts += sum(map(ne, ring, ring[stride:])) + sum(map(ne, ring[-stride:], ring))
    return cuts
