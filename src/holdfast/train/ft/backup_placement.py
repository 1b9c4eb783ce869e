"""Assigns each node a backup node for peer checkpoints, outside of its parallel groups where possible.

Each node backs up exactly one other, rank for rank, so that all nodes need the same memory. Nodes that work together
often fail together (ByteRobust evicts whole groups at a time), so a node's backup is outside all groups of its ranks,
if any node is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple


class BackupPlacement(NamedTuple):
    """Backup assignment; a node's ranks have consecutive numbers, the same count on each node."""

    backup_ranks: tuple[int, ...]
    """For each rank, the rank whose node holds its peer checkpoint; itself if there is one node."""
    within_group: tuple[int, ...]
    """Nodes whose backup shares a parallel group with them."""

    def primary_of(self, rank: int) -> int:
        """The rank whose peer checkpoint is on this rank's node."""
        return self.backup_ranks.index(rank)


def assign_backups(nodes: int, per_node: int, groups: Iterable[frozenset[int]]) -> BackupPlacement:
    """Assign each node's backup to another node. `groups` contain ranks; a group of all ranks is ignored."""
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
    """Extend the matching `kept` (backup node to primary node) to as many nodes as possible.

    Kuhn's algorithm: a node that has a backup may move to another to free it; the next node is tried first.
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
