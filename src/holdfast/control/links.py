"""Owns the controller's ends of the agents' connections: whose they are, what is sent, which words are known safe."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.events import AgentEvent, AgentJoined
from holdfast.events.orders import Acknowledge, Order, Progress

ACKNOWLEDGED_AT_ONCE, ACKNOWLEDGE_S = 64, 0.02
"""Agents that are told in one go that their words are safe, a few milliseconds' work, and seconds until the next go.

Nobody waits for it, and with thousands of agents it would hold up those who do: a node that joins, an order to start.
"""


class NotItsOwn(ValueError):
    """An agent spoke of what is not its own, or cannot be."""


class AgentPeer(Protocol):
    """The controller's end of one agent's connection."""

    def send(self, order: Order) -> None:
        """Queue an order; a closed connection is no error (the agent asks again when it returns)."""
        ...

    def then(self, act: Callable[[], None]) -> None:
        """Act once what is queued has gone out; never, where the connection closes before."""
        ...

    def close(self) -> None:
        """Close the connection once what is queued has gone out."""
        ...


@dataclass
class AgentLink:
    """What the controller keeps of one connected agent."""

    peer: AgentPeer
    joined: AgentJoined
    clock_ahead_s: float
    received: int = 0
    """Highest sequence number taken in."""
    acknowledged: int = 0
    unsettled: deque[tuple[int, Callable[[], bool]]] = field(default_factory=deque[tuple[int, Callable[[], bool]]])
    """Words that are not in the log yet, by number, and how to tell that they are; not acknowledged before."""
    copied: int | None = None
    """Bytes of the log that its node has been given to keep; None where it keeps none."""

    def check_own(self, message: AgentEvent | Progress, *, replica: int | None, world_size: int) -> None:
        """Raise `NotItsOwn` for a word about another node, or of joining: an agent joins once, when it connects."""
        own = (
            message.source == self.joined.source
            and getattr(message, "node", self.joined.node) == self.joined.node
            and getattr(message, "replica", replica) == replica
            and getattr(message, "rank", 0) < world_size
        )
        if not own or isinstance(message, AgentJoined):
            raise NotItsOwn(f"node{self.joined.node} said {message}")

    def acknowledge(self) -> None:
        """Tell the agent how far its words are safe: written, or of an attempt that is over."""
        while self.unsettled:
            _, is_written = self.unsettled[0]
            if not is_written():
                break
            self.unsettled.popleft()
        safe = self.unsettled[0][0] - 1 if self.unsettled else self.received
        if safe > self.acknowledged:
            self.acknowledged = safe
            self.peer.send(Acknowledge(seq=safe))


class Links:
    """The connected agents, by node."""

    def __init__(self) -> None:
        self._by_node: dict[int, AgentLink] = {}
        self._parted = asyncio.Event()
        self._owed: deque[AgentLink] = deque()
        """Agents that may have words that are safe and have not been told so."""
        self._owing: asyncio.TimerHandle | None = None

    def add(self, link: AgentLink) -> None:
        """Take a connection in, in place of the agent's former one."""
        former = self._by_node.get(link.joined.node)
        if former is not None:
            former.peer.close()
        self._by_node[link.joined.node] = link

    def remove(self, link: AgentLink) -> bool:
        """Forget a connection that has closed; False where the agent has another by now."""
        if self._by_node.get(link.joined.node) is not link:
            return False
        del self._by_node[link.joined.node]
        self._parted.set()
        return True

    def send(self, nodes: Iterable[int] | None, make: Callable[[int], Order]) -> None:
        """Send each of these nodes (None: of all) its order; one that is away is told when it joins again."""
        for node in [*self._by_node] if nodes is None else nodes:
            if node in self._by_node:
                self._by_node[node].peer.send(make(node))

    def copying(self) -> list[AgentLink]:
        """Those of nodes that keep a copy of the log."""
        return [link for link in self._by_node.values() if link.copied is not None]

    async def emptied(self) -> None:
        """Until no agent is connected."""
        while self._by_node:
            self._parted.clear()
            await self._parted.wait()

    def acknowledge_all(self) -> None:
        """Tell all what of theirs is safe: some now, the others a little later."""
        self._owed = deque(self._by_node.values())
        self._acknowledge_some()

    def withhold(self) -> None:
        """Acknowledge nothing more until `acknowledge_all`: what was taken in may not be in the log."""
        self._owed.clear()

    def _acknowledge_some(self) -> None:
        if self._owing is not None:
            self._owing.cancel()
        for _ in range(min(ACKNOWLEDGED_AT_ONCE, len(self._owed))):
            self._owed.popleft().acknowledge()
        later = asyncio.get_running_loop().call_later
        self._owing = later(ACKNOWLEDGE_S, self._acknowledge_some) if self._owed else None
