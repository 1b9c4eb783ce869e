"""Owns the memory in which the ranks of this node leave state: to the processes that take their places, and as copies.

Pieces without a name, counted as this process's: they outlive every rank, and end with the agent. What is in them, and
whether it is whole, is the ranks' affair (train/ft/memory_snapshot.py, train/ft/peer_checkpoint.py).
"""

from __future__ import annotations

import logging
import os
from io import FileIO

from holdfast.agent.prewarm import RankSlot

log = logging.getLogger("holdfast.agent")


PEER_CHECKPOINT_MEMFDS = 4
"""Pieces that a rank's copies and those of a peer lie in: two of each (train/ft/peer_checkpoint.py)."""


class StateMemory:
    """The pieces of one node, made when a slot's rank is started first."""

    def __init__(self) -> None:
        self._transfer: dict[RankSlot, FileIO] = {}
        self._peer_checkpoints: dict[RankSlot, tuple[FileIO, ...]] = {}

    def environ(self, slot: RankSlot, *, peer_checkpoint: bool) -> dict[str, str]:
        """How the ranks of a slot find theirs, one after the other; nothing while no file can be opened."""
        try:
            if slot not in self._transfer:
                self._transfer[slot] = _create_memfd("handover")
            if peer_checkpoint and slot not in self._peer_checkpoints:
                self._peer_checkpoints[slot] = tuple(_create_memfd("copy") for _ in range(PEER_CHECKPOINT_MEMFDS))
        except OSError as error:
            log.error("no memory to leave state in: %s", error)
        found: dict[str, tuple[FileIO, ...]] = {}
        if slot in self._transfer:
            found["HOLDFAST_TRANSFER_MEMORY"] = (self._transfer[slot],)
        if peer_checkpoint and slot in self._peer_checkpoints:
            found["HOLDFAST_PEER_MEMORY"] = self._peer_checkpoints[slot]
        return {name: ":".join(map(_fd_path, pieces)) for name, pieces in found.items()}

    def free(self, replica: int) -> None:
        """Give back what a replica's ranks have handed over: nobody goes back to it."""
        for slot, piece in self._transfer.items():
            if slot[0] == replica:
                piece.truncate(0)


def _create_memfd(what: str) -> FileIO:
    return FileIO(os.memfd_create(f"holdfast-{what}", os.MFD_CLOEXEC), "r+")


def _fd_path(piece: FileIO) -> str:
    return f"/proc/{os.getpid()}/fd/{piece.fileno()}"
