"""Owns which rank's node keeps a copy of a rank's state: another node, one that shares no parallel group where it can.

Pure. A node keeps what one other has, rank for rank, so that no memory has to hold more than another's. What fails
together is often what works together (ByteRobust gives up whole groups at once), so a node's copy lies outside of all
groups of its ranks, as far as groups leave a node outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple


class BackupPlacement(NamedTuple):
    """Where copies go; ranks of a node have numbers in a row, as many on each."""

    backup_ranks: tuple[int, ...]
    """For each rank the one on whose node its copy lies; itself where there is one node."""
    within_group: tuple[int, ...]
    """Nodes whose copy lies on one that a rank of theirs shares a group with."""

    def primary_of(self, rank: int) -> int:
        """The rank whose copy lies on this one's node."""
        return self.backup_ranks.index(rank)


def assign_backups(nodes: int, per_node: int, groups: Iterable[frozenset[int]]) -> BackupPlacement:
    """Have each node's copies on another. `groups` are of ranks; one that has all of them tells nothing."""
    if nodes == 1:
        return BackupPlacement(tuple(range(per_node)), ())
    near: list[set[int]] = [set() for _ in range(nodes)]
    for group in groups:
        there = {rank // per_node for rank in group}
        if len(group) < nodes * per_node:
            for node in there:
                near[node] |= there
    kept: dict[int, int] = {}
    _match(nodes, kept, lambda node, keeper: keeper not in near[node])
    _match(nodes, kept, lambda node, keeper: True)
    keeper_of = {node: keeper for keeper, node in kept.items()}
    keepers = (keeper_of[rank // per_node] * per_node + rank % per_node for rank in range(nodes * per_node))
    return BackupPlacement(tuple(keepers), tuple(node for node in range(nodes) if keeper_of[node] in near[node]))


def _match(nodes: int, kept: dict[int, int], may: Callable[[int, int], bool]) -> None:
    """Find as many nodes as can be a keeper that has no other; `kept` is whose each keeps.

    One that has a keeper may get another so that a second gets one: Kuhn's matching, the next node tried first.
    """
    for first in sorted(set(range(nodes)) - set(kept.values())):
        asked_by: dict[int, int] = {}
        waiting, free = deque([first]), None
        while waiting and free is None:
            node = waiting.popleft()
            for keeper in ((node + by) % nodes for by in range(1, nodes)):
                if keeper in asked_by or not may(node, keeper):
                    continue
                asked_by[keeper] = node
                if keeper not in kept:
                    free = keeper
                    break
                waiting.append(kept[keeper])
        while free is not None:
            node = asked_by[free]
            before = next((keeper for keeper, whose in kept.items() if whose == node), None)
            kept[free] = node
            free = before
