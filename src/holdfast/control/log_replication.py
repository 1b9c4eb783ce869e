"""Replicates the run's log to nodes, for controllers whose folder is lost with their machine.

Each line goes to the nodes as soon as it is written, before any order that follows from it, so that no agent with a
replica knows more than its replica. log_restore.py restores the log from replicas.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from holdfast.control.agent_connections import AgentRegistry
from holdfast.events.agent_events import LogReplicaPosition
from holdfast.host.files import open_regular
from holdfast.protocol.orders import ReplicateLog

MAX_REPLICAS = 8
"""Number of nodes that keep a replica, the lowest-numbered ones: enough to survive a rack, few enough to cost nothing.
"""
CHUNK_BYTES = 1 << 20
MAX_UNSENT = 64
"""Commits that wait to be sent and whose age is remembered; further ones share the age of the last of these."""


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
        self._unsent: deque[tuple[int, float]] = deque()
        """Ends of the log that no node has been sent, each with the monotonic time when it was written."""

    @property
    def unsent_s(self) -> float:
        """Age in seconds of the oldest lines that no node has been sent; 0 if there are none."""
        return time.monotonic() - self._unsent[0][1] if self._unsent else 0.0

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
        self._remember_unsent(self._size)
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
            connection.peer.after_sent(partial(self._on_sent, end))
            if self._on_first_ack is not None:
                connection.peer.after_sent(self._notify_first_ack)

    def _remember_unsent(self, end: int) -> None:
        is_full = len(self._unsent) == MAX_UNSENT
        written_at = self._unsent.pop()[1] if is_full else time.monotonic()
        self._unsent.append((end, written_at))

    def _on_sent(self, end: int) -> None:
        while self._unsent and self._unsent[0][0] <= end:
            self._unsent.popleft()

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
