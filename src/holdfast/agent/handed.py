"""Owns the memory in which the ranks of this node leave state: to the processes that take their places, and as copies.

Pieces without a name, counted as this process's: they outlive every rank, and end with the agent. What is in them, and
whether it is whole, is the ranks' affair (train/handover.py, train/peercopies.py).
"""

from __future__ import annotations

import logging
import os
from io import FileIO

from holdfast.agent.warmth import Slot

log = logging.getLogger("holdfast.agent")


COPIES = 4
"""Pieces that a rank's copies and those of a peer lie in: two of each (train/peercopies.py)."""


class Handed:
    """The pieces of one node, made when a slot's rank is started first."""

    def __init__(self) -> None:
        self._handover: dict[Slot, FileIO] = {}
        self._copies: dict[Slot, tuple[FileIO, ...]] = {}

    def variables(self, slot: Slot, *, copies: bool) -> dict[str, str]:
        """How the ranks of a slot find theirs, one after the other; nothing while no file can be opened."""
        try:
            if slot not in self._handover:
                self._handover[slot] = _piece("handover")
            if copies and slot not in self._copies:
                self._copies[slot] = tuple(_piece("copy") for _ in range(COPIES))
        except OSError as error:
            log.error("no memory to leave state in: %s", error)
        found: dict[str, tuple[FileIO, ...]] = {}
        if slot in self._handover:
            found["HOLDFAST_HANDOVER"] = (self._handover[slot],)
        if copies and slot in self._copies:
            found["HOLDFAST_PEER_MEMORY"] = self._copies[slot]
        return {name: ":".join(map(_path, pieces)) for name, pieces in found.items()}

    def release(self, replica: int) -> None:
        """Give back what a replica's ranks have handed over: nobody goes back to it."""
        for slot, piece in self._handover.items():
            if slot[0] == replica:
                piece.truncate(0)


def _piece(what: str) -> FileIO:
    return FileIO(os.memfd_create(f"holdfast-{what}", os.MFD_CLOEXEC), "r+")


def _path(piece: FileIO) -> str:
    return f"/proc/{os.getpid()}/fd/{piece.fileno()}"
