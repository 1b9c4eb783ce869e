"""What agents' monitors read, requested when the controller is scraped and never otherwise.

A scrape shows what the agents sent after an earlier one: it waits for no agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from holdfast.control.agent_connections import AgentRegistry
from holdfast.protocol.orders import NodeReadings, ReadMonitors
from holdfast.watch.node_values import NODE_VALUES

MAX_NODES_READ = 56
"""Nodes whose readings are kept, the lowest-numbered ones: with more, 16,384 ranks would exceed 5,000 series."""
MIN_INTERVAL_S = 5.0
"""Shortest time between two requests, however many scrapers there are."""
STALE_S = 120.0
"""Age in seconds from which the readings of a node that does not answer are not shown."""


class NodeReadingsStore:
    """The latest readings by node."""

    def __init__(self, agents: AgentRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._agents = agents
        self._clock = clock
        self._latest: dict[int, tuple[float, Mapping[str, float]]] = {}
        """When they came, and what."""
        self._requested_s = -MIN_INTERVAL_S

    def add(self, message: NodeReadings) -> None:
        """Keep a node's readings."""
        if message.node < MAX_NODES_READ:
            known = {name: value for name, value in message.values.items() if name in NODE_VALUES}
            self._latest[message.node] = self._clock(), known

    def read(self) -> dict[int, Mapping[str, float]]:
        """The readings of connected nodes; asks their agents for the next ones."""
        now, connected = self._clock(), [node for node in self._agents.nodes() if node < MAX_NODES_READ]
        if now - self._requested_s >= MIN_INTERVAL_S:
            self._requested_s = now
            self._agents.send(connected, lambda _: ReadMonitors())
        known = {node: self._latest[node] for node in sorted(connected) if node in self._latest}
        return {node: values for node, (at_s, values) in known.items() if now - at_s < STALE_S}
