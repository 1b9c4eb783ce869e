"""Batched events: one log line for what many nodes of a large replica reported alike.

A replica of thousands of nodes starts and stops within a second; one line per node and rank would make a month's log
too large to read (docs/decisions/0014). The senders are kept as ranges of numbers.
"""

from __future__ import annotations

from holdfast.events.agent_events import ExitReason
from holdfast.events.base import Event
from holdfast.events.ranges import Ranges


class NodesStarted(Event, frozen=True, kw_only=True):
    """Many nodes started their ranks of an attempt; each agent's log has the process ids.

    The ranks are divided evenly among the nodes, in order.
    """

    replica: int
    attempt: int
    nodes: Ranges
    ranks: Ranges


class NodesStopped(Event, frozen=True, kw_only=True):
    """No process of this attempt is left on many nodes; `ports` are their newly reserved ports, in node order."""

    replica: int
    attempt: int
    nodes: Ranges
    ports: tuple[int, ...]


class RanksExited(Event, frozen=True, kw_only=True):
    """Many ranks exited alike after the first failures; the fields are those of `RankExited`."""

    replica: int
    attempt: int
    ranks: Ranges
    reason: ExitReason
    code: int = 0
    stopped: bool = False

    @property
    def failed(self) -> bool:
        """See `RankExited.failed`."""
        return not (self.stopped or self.reason.is_success(self.code))


class RanksHung(Event, frozen=True, kw_only=True):
    """Many ranks hang, and other ranks are likelier causes; their stacks are on their nodes."""

    replica: int
    attempt: int
    ranks: Ranges
    unless_others_work: bool = False
    """As in `RankHung`."""
    last_step_at: float = 0.0
    """The latest of these ranks' last steps."""
