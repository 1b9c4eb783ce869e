"""The controller's connections to agents: which node each belongs to, its clock, queued orders and acknowledgements."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from holdfast.clock import Clock
from holdfast.events import AgentConnected
from holdfast.protocol.orders import Acknowledge, AgentMessage, Order, Progress, Shutdown, UnknownMessage

ACK_BATCH, ACK_INTERVAL_S = 64, 0.02
"""Agents acknowledged in one batch, a few milliseconds' work, and seconds until the next batch.

No process waits for acknowledgements, and with thousands of agents they would delay urgent work: a joining node, a
start order.
"""


CLOCK_TOLERANCE_S = 0.25
"""Clock differences below this are ignored: they may be the message's travel time."""

SAME_CLOCK_S = 0.001
"""Maximum difference between two readings of one machine's clocks: the time between reading both."""

_CLOCK_FIELDS = ("at", "last_step_at", "started", "ended")

TimedMessage = TypeVar("TimedMessage", bound=msgspec.Struct)


class ForeignMessage(ValueError):
    """An agent sent a message about another node, or one that cannot be valid."""


class AgentPeer(Protocol):
    """The controller's end of one agent's connection."""

    def send(self, order: Order) -> None:
        """Queue an order; a closed connection is not an error (the agent catches up when it reconnects)."""
        ...

    def after_sent(self, act: Callable[[], None]) -> None:
        """Call `act` once the queue has been sent; never, if the connection closes before."""
        ...

    def close(self) -> None:
        """Close the connection once the queue has been sent."""
        ...


class AgentConnection(Struct):
    """The controller's state of one connected agent."""

    peer: AgentPeer
    joined: AgentConnected
    clock_offset_s: float
    last_received_seq: int = 0
    """Highest sequence number received."""
    last_acked_seq: int = 0
    unacked: deque[tuple[int, Callable[[], bool]]] = field(default_factory=deque[tuple[int, Callable[[], bool]]])
    """Messages that may not be in the log yet, by sequence number, each with a check that it is."""
    replicated_bytes: int | None = None
    """Bytes of the log that the node has been sent to replicate; None if it keeps no replica."""

    @property
    def has_resent(self) -> bool:
        """Whether it has sent everything again that an earlier controller may not have logged."""
        return self.last_received_seq >= self.joined.unacked_seq

    def check_origin(self, message: AgentMessage | UnknownMessage, *, replica: int | None, world_size: int) -> None:
        """Raise `ForeignMessage` for a message about another node, or a second `AgentConnected` on one connection."""
        own = (
            message.source == self.joined.source
            and getattr(message, "node", self.joined.node) == self.joined.node
            and getattr(message, "replica", replica) == replica
            and getattr(message, "rank", 0) < world_size
        )
        if not own or isinstance(message, AgentConnected):
            raise ForeignMessage(f"node{self.joined.node} sent {message}")

    def acknowledge(self) -> None:
        """Acknowledge the agent's messages that are in the log, or of an attempt that is over."""
        while self.unacked:
            _, is_written = self.unacked[0]
            if not is_written():
                break
            self.unacked.popleft()
        safe = self.unacked[0][0] - 1 if self.unacked else self.last_received_seq
        if safe > self.last_acked_seq:
            self.last_acked_seq = safe
            self.peer.send(Acknowledge(seq=safe))


def clock_offset_s(clock: Clock, joined: AgentConnected) -> float:
    """Seconds that an agent's clock is ahead of ours: exact on one machine, else estimated from its hello."""
    exact = clock.offset_s(joined.clock)
    ahead_s, tolerance_s = (joined.at - clock(), CLOCK_TOLERANCE_S) if exact is None else (exact, SAME_CLOCK_S)
    return ahead_s if abs(ahead_s) > tolerance_s else 0.0


def to_controller_time(message: TimedMessage, ahead_s: float) -> TimedMessage:
    """Convert the times of a message from its sender's clock to the controller's."""
    if not ahead_s:
        return message
    if isinstance(message, Progress):
        steps = tuple(to_controller_time(step, ahead_s) for step in message.steps)
        return msgspec.structs.replace(message, steps=steps)
    times = {name: getattr(message, name) - ahead_s for name in _CLOCK_FIELDS if hasattr(message, name)}
    return msgspec.structs.replace(message, **times)


class AgentRegistry:
    """The connected agents, by node."""

    def __init__(self) -> None:
        self._by_node: dict[int, AgentConnection] = {}
        self._resent: set[int] = set()
        """Nodes that have sent this controller what an earlier one may not have logged."""
        self._changed = asyncio.Event()
        self._dismissed = False
        self._ack_queue: deque[AgentConnection] = deque()
        """Agents that may have messages to acknowledge."""
        self._ack_timer: asyncio.TimerHandle | None = None

    def add(self, connection: AgentConnection) -> None:
        """Add a connection, replacing the agent's previous one."""
        previous = self._by_node.get(connection.joined.node)
        if previous is not None:
            previous.peer.close()
        self._by_node[connection.joined.node] = connection
        self.note_received(connection)
        if self._dismissed:
            connection.peer.send(Shutdown())

    def remove(self, connection: AgentConnection) -> bool:
        """Remove a closed connection; False if the agent has another by now."""
        if self._by_node.get(connection.joined.node) is not connection:
            return False
        del self._by_node[connection.joined.node]
        self._changed.set()
        return True

    def note_received(self, connection: AgentConnection) -> None:
        """Note that an agent has connected or sent messages: `wait_resent` may have waited for it."""
        if connection.has_resent and connection.joined.node not in self._resent:
            self._resent.add(connection.joined.node)
            self._changed.set()

    def send(self, nodes: Iterable[int] | None, make: Callable[[int], Order]) -> None:
        """Send each of these nodes (None: all) its order; a disconnected one catches up when it reconnects."""
        for node in [*self._by_node] if nodes is None else nodes:
            if node in self._by_node:
                self._by_node[node].peer.send(make(node))

    def nodes(self) -> list[int]:
        """The connected nodes."""
        return [*self._by_node]

    def log_replicas(self) -> list[AgentConnection]:
        """Connections of nodes that keep a log replica."""
        return [connection for connection in self._by_node.values() if connection.replicated_bytes is not None]

    def dismiss(self) -> None:
        """Order all agents to exit, and each that connects from now on."""
        self._dismissed = True
        self.send(None, lambda _: Shutdown())

    async def wait_resent(self, nodes: Set[int]) -> None:
        """Wait until these nodes have sent this controller everything that an earlier one may not have logged."""
        await self._wait(lambda: nodes <= self._resent)

    async def wait_empty(self) -> None:
        """Wait until no agent is connected."""
        await self._wait(lambda: not self._by_node)

    async def _wait(self, is_met: Callable[[], bool]) -> None:
        while not is_met():
            self._changed.clear()
            await self._changed.wait()

    def acknowledge_all(self) -> None:
        """Acknowledge the messages of all agents: some now, the others a little later."""
        self._ack_queue = deque(self._by_node.values())
        self._acknowledge_some()

    def pause_acks(self) -> None:
        """Acknowledge nothing more until `acknowledge_all`: received messages may not be in the log."""
        self._ack_queue.clear()

    def _acknowledge_some(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        for _ in range(min(ACK_BATCH, len(self._ack_queue))):
            self._ack_queue.popleft().acknowledge()
        later = asyncio.get_running_loop().call_later
        self._ack_timer = later(ACK_INTERVAL_S, self._acknowledge_some) if self._ack_queue else None
