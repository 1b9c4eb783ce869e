"""Counts what the ranks of one node send to other nodes by TCP in each step, by interface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from holdfast.agent.data_sockets import NodeAddresses, RankSocket
from holdfast.host.tcp_sockets import TcpCounters
from holdfast.metrics.metric_catalog import TCP_RETRANSMITS, TCP_SENT_BYTES, metric_of


class TcpTraffic:
    """The traffic of one attempt: a mean per step, of the steps between two looks."""

    def __init__(self) -> None:
        self._last: dict[int, TcpCounters] = {}
        """By inode."""
        self._sums = Counter[str]()
        """What was sent since the last step of the last mean, by metric."""
        self._steps = 0
        self._metrics: dict[str, float] = {}

    def add(self, sockets: Iterable[RankSocket], addresses: NodeAddresses, steps: int) -> int:
        """A look at all sockets, after this number of steps; returns the bytes carried since the last look."""
        now, carried_bytes = {each.socket.inode: each.socket for each in sockets}, 0
        for inode, each in now.items():
            before = self._last.get(inode, TcpCounters())
            carried_bytes += each.counters.acked_bytes - before.acked_bytes
            carried_bytes += each.counters.received_bytes - before.received_bytes
            name = addresses.interface(each)
            self._sums[metric_of(TCP_SENT_BYTES, name)] += each.counters.acked_bytes - before.acked_bytes
            self._sums[metric_of(TCP_RETRANSMITS, name)] += each.counters.retransmits - before.retransmits
        self._last = {inode: each.counters for inode, each in now.items()}
        if steps == self._steps:
            return carried_bytes
        if self._steps:  # what was sent before the first step is not the steps'
            self._metrics = {name: total / (steps - self._steps) for name, total in self._sums.items()}
        self._sums.clear()
        self._steps = steps
        return carried_bytes

    def take(self) -> dict[str, float]:
        """The latest means, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics
