"""Owns the controller's ends of the agents' connections: whose they are, what is sent, which words are known safe."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.events import AgentConnected, AgentEvent
from holdfast.protocol.orders import Acknowledge, Order, Progress

ACK_BATCH, ACK_INTERVAL_S = 64, 0.02
"""Agents that are told in one go that their words are safe, a few milliseconds' work, and seconds until the next go.

Nobody waits for it, and with thousands of agents it would hold up those who do: a node that joins, an order to start.
"""


class ForeignMessage(ValueError):
    """An agent spoke of what is not its own, or cannot be."""


class AgentPeer(Protocol):
    """The controller's end of one agent's connection."""

    def send(self, order: Order) -> None:
        """Queue an order; a closed connection is no error (the agent asks again when it returns)."""
        ...

    def after_sent(self, act: Callable[[], None]) -> None:
        """Act once what is queued has gone out; never, where the connection closes before."""
        ...

    def close(self) -> None:
        """Close the connection once what is queued has gone out."""
        ...


@dataclass
class AgentConnection:
    """What the controller keeps of one connected agent."""

    peer: AgentPeer
    joined: AgentConnected
    clock_offset_s: float
    last_received_seq: int = 0
    """Highest sequence number taken in."""
    last_acked_seq: int = 0
    unacked: deque[tuple[int, Callable[[], bool]]] = field(default_factory=deque[tuple[int, Callable[[], bool]]])
    """Words that are not in the log yet, by number, and how to tell that they are; not acknowledged before."""
    replicated_bytes: int | None = None
    """Bytes of the log that its node has been given to keep; None where it keeps none."""

    def check_origin(self, message: AgentEvent | Progress, *, replica: int | None, world_size: int) -> None:
        """Raise `ForeignMessage` for a word about another node, or of joining: an agent joins once, when it connects."""
        own = (
            message.source == self.joined.source
            and getattr(message, "node", self.joined.node) == self.joined.node
            and getattr(message, "replica", replica) == replica
            and getattr(message, "rank", 0) < world_size
        )
        if not own or isinstance(message, AgentConnected):
            raise ForeignMessage(f"node{self.joined.node} said {message}")

    def acknowledge(self) -> None:
        """Tell the agent how far its words are safe: written, or of an attempt that is over."""
        while self.unacked:
            _, is_written = self.unacked[0]
            if not is_written():
                break
            self.unacked.popleft()
        safe = self.unacked[0][0] - 1 if self.unacked else self.last_received_seq
        if safe > self.last_acked_seq:
            self.last_acked_seq = safe
            self.peer.send(Acknowledge(seq=safe))


class AgentRegistry:
    """The connected agents, by node."""

    def __init__(self) -> None:
        self._by_node: dict[int, AgentConnection] = {}
        self._disconnected = asyncio.Event()
        self._ack_queue: deque[AgentConnection] = deque()
        """Agents that may have words that are safe and have not been told so."""
        self._ack_timer: asyncio.TimerHandle | None = None

    def add(self, link: AgentConnection) -> None:
        """Take a connection in, in place of the agent's former one."""
        former = self._by_node.get(link.joined.node)
        if former is not None:
            former.peer.close()
        self._by_node[link.joined.node] = link

    def remove(self, link: AgentConnection) -> bool:
        """Forget a connection that has closed; False where the agent has another by now."""
        if self._by_node.get(link.joined.node) is not link:
            return False
        del self._by_node[link.joined.node]
        self._disconnected.set()
        return True

    def send(self, nodes: Iterable[int] | None, make: Callable[[int], Order]) -> None:
        """Send each of these nodes (None: of all) its order; one that is away is told when it joins again."""
        for node in [*self._by_node] if nodes is None else nodes:
            if node in self._by_node:
                self._by_node[node].peer.send(make(node))

    def log_replicas(self) -> list[AgentConnection]:
        """Those of nodes that keep a copy of the log."""
        return [link for link in self._by_node.values() if link.replicated_bytes is not None]

    async def wait_empty(self) -> None:
        """Until no agent is connected."""
        while self._by_node:
            self._disconnected.clear()
            await self._disconnected.wait()

    def acknowledge_all(self) -> None:
        """Tell all what of theirs is safe: some now, the others a little later."""
        self._ack_queue = deque(self._by_node.values())
        self._acknowledge_some()

    def pause_acks(self) -> None:
        """Acknowledge nothing more until `acknowledge_all`: what was taken in may not be in the log."""
        self._ack_queue.clear()

    def _acknowledge_some(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        for _ in range(min(ACK_BATCH, len(self._ack_queue))):
            self._ack_queue.popleft().acknowledge()
        later = asyncio.get_running_loop().call_later
        self._ack_timer = later(ACK_INTERVAL_S, self._acknowledge_some) if self._ack_queue else None
