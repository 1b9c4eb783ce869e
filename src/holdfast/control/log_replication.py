"""Replicates the run's log to nodes, for controllers whose folder is lost with their machine.

Each line goes to the nodes as soon as it is written, before any order that follows from it, so that no agent with a
replica knows more than its replica. log_restore.py restores the log from replicas.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.control.agent_connections import AgentRegistry
from holdfast.events.agent_events import LogReplicaPosition
from holdfast.host.files import open_regular
from holdfast.protocol.orders import ReplicateLog

MAX_REPLICAS = 8
"""Number of nodes that keep a replica, the lowest-numbered ones: enough to survive a rack, few enough to cost nothing.
"""
CHUNK_BYTES = 1 << 20


class LogReplicator:
    """Sends new log lines to nodes; `sign` makes a signature of the log's digest that only the controller can make.

    `on_first_ack` is called once, when the first node has been sent everything written until then.
    """

    def __init__(self, log: Path, sign: Callable[[bytes], str], on_first_ack: Callable[[], None] | None = None) -> None:
        self._log = log
        self._sign = sign
        self._on_first_ack = on_first_ack
        self._digest = hashlib.sha256()
        self._digested_bytes = 0

    def position_of(self, node: int, copy: LogReplicaPosition) -> int | None:
        """Bytes of a node's replica that match this log; None for a node that need not keep a replica."""
        if node >= MAX_REPLICAS:
            return None
        found = hashlib.sha256()
        for _, data in self._chunks(0, copy.bytes):
            found.update(data)
        return copy.bytes if copy.bytes <= self._size and self._sign(found.digest()) == copy.signature else 0

    def replicate(self, registry: AgentRegistry) -> None:
        """Send each node that keeps a replica what it lacks."""
        behind = [
            (connection, connection.replicated_bytes)
            for connection in registry.log_replicas()
            if connection.replicated_bytes != self._size
        ]
        if not behind:
            return
        end = self._size
        for _, data in self._chunks(self._digested_bytes, end):
            self._digest.update(data)
        self._digested_bytes, signature = end, self._sign(self._digest.digest())
        for connection, had in behind:
            for at, data in self._chunks(had or 0, end):
                connection.peer.send(
                    ReplicateLog(offset=at, data=data, signature=signature if at + len(data) == end else "")
                )
            connection.replicated_bytes = end
            if self._on_first_ack is not None:
                connection.peer.after_sent(self._notify_first_ack)

    def _notify_first_ack(self) -> None:
        on_first_ack, self._on_first_ack = self._on_first_ack, None
        if on_first_ack is not None:
            on_first_ack()

    @property
    def _size(self) -> int:
        return self._log.stat().st_size

    def _chunks(self, at: int, end: int) -> Iterator[tuple[int, bytes]]:
        with open_regular(self._log) as file:
            while data := os.pread(file.fileno(), min(CHUNK_BYTES, end - at), at):
                yield at, data
                at += len(data)
