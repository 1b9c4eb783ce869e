"""Events that the controller writes for many words of agents at once: what a large replica's nodes say alike.

A replica of thousands of nodes starts and stops within a second, and a line for each of its nodes and ranks would make
a month's log larger than anybody reads (docs/decisions/0014). Who said it is kept as spans of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.events.agent_events import ExitReason
from holdfast.events.base import Event

Ranges = tuple[tuple[int, int], ...]
"""Numbers in order, as first and last of each unbroken row: 0, 1, 2, 5 are ((0, 2), (5, 5))."""


def to_ranges(numbers: Iterable[int]) -> Ranges:
    """Numbers as spans, in order and each once."""
    drawn: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if drawn and drawn[-1][1] == number - 1:
            drawn[-1] = (drawn[-1][0], number)
        else:
            drawn.append((number, number))
    return tuple(drawn)


def from_ranges(spans: Ranges) -> Iterator[int]:
    """The numbers that spans stand for, in order."""
    return (number for first, last in spans for number in range(first, last + 1))


class NodesStarted(Event, frozen=True, kw_only=True):
    """Many nodes started their ranks of an attempt; each agent's own log has the processes' numbers.

    The ranks are divided among the nodes evenly, in order.
    """

    replica: int
    attempt: int
    nodes: Ranges
    ranks: Ranges


class NodesStopped(Event, frozen=True, kw_only=True):
    """No process of this attempt is left on many nodes; `ports` are the fresh ones they hold, in the nodes' order."""

    replica: int
    attempt: int
    nodes: Ranges
    ports: tuple[int, ...]


class RanksExited(Event, frozen=True, kw_only=True):
    """Many ranks ended alike, and none of them first; the fields are those of `RankExited`."""

    replica: int
    attempt: int
    ranks: Ranges
    reason: ExitReason
    code: int = 0
    stopped: bool = False

    @property
    def failed(self) -> bool:
        """As `RankExited.failed`."""
        return not (self.stopped or self.reason.is_success(self.code))


class RanksHung(Event, frozen=True, kw_only=True):
    """Many ranks hang, and others are likelier to be the cause; their stacks are on their nodes."""

    replica: int
    attempt: int
    ranks: Ranges
