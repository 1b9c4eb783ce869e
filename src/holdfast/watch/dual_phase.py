"""Plans replays of a run's last steps on sub-groups of its nodes, and names the bad nodes after two of them.

The first replay groups neighbours, as x // m does, the second groups node x by x % n, with m ≤ n and m · n at least the
number of nodes. Two groups of different replays then share one node at most, so that one bad node is the only one whose
groups fail in both. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from enum import StrEnum
from math import isqrt
from typing import NamedTuple

Group = tuple[int, ...]
Digests = Mapping[Group, Hashable | None]
"""What is equal for equal states at the end of a replay, by group; None if it did not get there."""


class Outcome(StrEnum):
    """What a replay says of a group."""

    PASSED = "passed"
    FAILED = "failed"
    CONTESTED = "contested"
    """Groups of its size ended in different states, and no majority of them in one."""
    UNKNOWN = "unknown"
    """No other group of its size ended."""


class Replays(NamedTuple):
    """The groups of nodes of both replays; each node is in one group of each."""

    first: tuple[Group, ...]
    second: tuple[Group, ...]


class BadNodes(NamedTuple):
    """What two replays say of the nodes."""

    certain: Group = ()
    """Nodes that alone explain that a group failed."""
    suspects: Group = ()
    """Further nodes of groups that failed or are contested, of which no other group passed: some of them are bad."""


PEERS = 3
"""Groups of one size, of which two then outvote the one with a bad node."""


def plan(nodes: Sequence[int]) -> Replays:
    """The groups for these nodes, of sizes that differ by one at most: as few as have their peers, and share one node.

    With fewer than three nodes no group has peers.
    """
    total = len(nodes)
    fits = (count for count in range(max(1, isqrt(max(0, total - 1)) + 1), total) if _has_peers(total, count))
    count = next(fits, total)
    first = [tuple(nodes[-(-at * total // count) : -(-(at + 1) * total // count)]) for at in range(count)]
    return Replays(first=tuple(first), second=tuple(tuple(nodes[at::count]) for at in range(count)))


def _has_peers(total: int, count: int) -> bool:
    """Whether so many nodes in so many groups leave no size with fewer groups than PEERS."""
    larger = total % count
    return count - larger >= PEERS and (larger == 0 or larger >= PEERS)


def judge(groups: Sequence[Group], digests: Digests) -> dict[Group, Outcome]:
    """What the digest of each group's state at the end says; it has none if it did not get there.

    Only groups of one size compute the same: the order of a sum depends on the number of ranks.
    """
    outcomes = {group: Outcome.FAILED if digests.get(group) is None else Outcome.UNKNOWN for group in groups}
    for size in {len(group) for group in groups}:
        ended = [group for group in groups if len(group) == size and outcomes[group] is Outcome.UNKNOWN]
        if len(ended) < 2:
            continue
        ((common, count),) = Counter(digests[group] for group in ended).most_common(1)
        for group in ended:
            if 2 * count <= len(ended):
                outcomes[group] = Outcome.CONTESTED
            else:
                outcomes[group] = Outcome.PASSED if digests[group] == common else Outcome.FAILED
    return outcomes


def find_bad(replays: Replays, first: Digests, second: Digests) -> BadNodes:
    """The bad nodes, from the digests of the groups after each replay.

    None is certain unless some group passed: where all fail, the program or its data may be the cause.
    """
    outcomes = (*judge(replays.first, first).items(), *judge(replays.second, second).items())
    healthy = {node for group, outcome in outcomes if outcome is Outcome.PASSED for node in group}
    failed = [{*group} - healthy for group, outcome in outcomes if outcome is Outcome.FAILED]
    contested = [{*group} - healthy for group, outcome in outcomes if outcome is Outcome.CONTESTED]
    certain = {node for nodes in failed if len(nodes) == 1 and healthy for node in nodes}
    suspects = {node for nodes in (*failed, *contested) for node in nodes} - certain
    return BadNodes(certain=tuple(sorted(certain)), suspects=tuple(sorted(suspects)))
