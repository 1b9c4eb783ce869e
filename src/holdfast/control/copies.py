"""Owns the copies of a run's log that nodes keep, where the controller's folder is lost with its machine.

Each line goes to the nodes as soon as it is written, before any order that follows from it, so that no agent that keeps
a copy ever knows more than its copy tells. Refuses to own how a log is got back from them (recall.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.control.links import Links
from holdfast.events.agent import LogCopy
from holdfast.events.orders import KeepLog
from holdfast.host.files import open_plain

KEEPERS = 8
"""Nodes that keep a copy, the first ones: enough to outlive a rack, few enough to cost nothing."""
PIECE_BYTES = 1 << 20


class LogCopies:
    """Tells nodes what is new in the log; `seal` makes of its digest what nobody else can make.

    `told` is called, once, when the first node has been sent all that was written until then.
    """

    def __init__(self, log: Path, seal: Callable[[bytes], str], told: Callable[[], None] | None = None) -> None:
        self._log = log
        self._seal = seal
        self._told = told
        self._digest = hashlib.sha256()
        self._digested = 0

    def known_of(self, node: int, copy: LogCopy) -> int | None:
        """How much of a node's copy is of this very log; None for a node that need keep none."""
        if node >= KEEPERS:
            return None
        found = hashlib.sha256()
        for _, data in self._pieces(0, copy.bytes):
            found.update(data)
        return copy.bytes if copy.bytes <= self._size and self._seal(found.digest()) == copy.seal else 0

    def bring_up_to_date(self, links: Links) -> None:
        """Send each node that keeps a copy what it lacks."""
        behind = [(link, link.copied) for link in links.copying() if link.copied != self._size]
        if not behind:
            return
        end = self._size
        for _, data in self._pieces(self._digested, end):
            self._digest.update(data)
        self._digested, seal = end, self._seal(self._digest.digest())
        for link, had in behind:
            for at, data in self._pieces(had or 0, end):
                link.peer.send(KeepLog(at=at, data=data, seal=seal if at + len(data) == end else ""))
            link.copied = end
            if self._told is not None:
                link.peer.then(self._tell)

    def _tell(self) -> None:
        told, self._told = self._told, None
        if told is not None:
            told()

    @property
    def _size(self) -> int:
        return self._log.stat().st_size

    def _pieces(self, at: int, end: int) -> Iterator[tuple[int, bytes]]:
        with open_plain(self._log) as file:
            while data := os.pread(file.fileno(), min(PIECE_BYTES, end - at), at):
                yield at, data
                at += len(data)
