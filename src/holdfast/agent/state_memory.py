"""Memory in which this node's ranks keep state: for the processes that replace them, and as peer checkpoints.

Each memory block is a memfd of this process: it outlives every rank and ends with the agent. The ranks alone define and
check its content (train/ft/memory_snapshot.py, train/ft/peer_checkpoint.py).
"""

from __future__ import annotations

import logging
import os
from io import FileIO

from holdfast.agent.prewarm import RankSlot

log = logging.getLogger("holdfast.agent")


PEER_CHECKPOINT_MEMFDS = 4
"""Memfds for a rank's own peer checkpoint and for that of a peer: two of each (train/ft/peer_checkpoint.py)."""


class StateMemory:
    """The memfds of one node, created when a slot's rank first starts."""

    def __init__(self) -> None:
        self._transfer: dict[RankSlot, FileIO] = {}
        self._peer_checkpoints: dict[RankSlot, tuple[FileIO, ...]] = {}

    def environ(self, slot: RankSlot, *, peer_checkpoint: bool) -> dict[str, str]:
        """Variables that name the memfds of a slot's ranks, in order; none while memfds cannot be created."""
        try:
            if slot not in self._transfer:
                self._transfer[slot] = _create_memfd("state-transfer")
            if peer_checkpoint and slot not in self._peer_checkpoints:
                self._peer_checkpoints[slot] = tuple(
                    _create_memfd("peer-checkpoint") for _ in range(PEER_CHECKPOINT_MEMFDS)
                )
        except OSError as error:
            log.error("no memory to leave state in: %s", error)
        found: dict[str, tuple[FileIO, ...]] = {}
        if slot in self._transfer:
            found["HOLDFAST_TRANSFER_MEMORY"] = (self._transfer[slot],)
        if peer_checkpoint and slot in self._peer_checkpoints:
            found["HOLDFAST_PEER_MEMORY"] = self._peer_checkpoints[slot]
        return {name: ":".join(map(_fd_path, pieces)) for name, pieces in found.items()}

    def free(self, replica: int) -> None:
        """Free the state that a replica's ranks have transferred: no rank reads it again."""
        for slot, piece in self._transfer.items():
            if slot[0] == replica:
                piece.truncate(0)


def _create_memfd(what: str) -> FileIO:
    return FileIO(os.memfd_create(f"holdfast-{what}", os.MFD_CLOEXEC), "r+")


def _fd_path(piece: FileIO) -> str:
    return f"/proc/{os.getpid()}/fd/{piece.fileno()}"
