"""Owns the memory in which the ranks of this node leave their state to the processes that take their places.

A piece for each rank, without a name, counted as this process's: it outlives every rank, and ends with the agent. What
is in it, and whether it is whole, is the ranks' affair (train/handover.py).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from holdfast.agent.warmth import Slot

log = logging.getLogger("holdfast.agent")


class Handed:
    """The pieces of one node, made when a slot's rank is started first."""

    def __init__(self) -> None:
        self._pieces: dict[Slot, int] = {}

    def path(self, slot: Slot) -> Path | None:
        """Where the ranks of a slot find theirs, one after the other; none while no file can be opened."""
        if slot not in self._pieces:
            try:
                self._pieces[slot] = os.memfd_create("holdfast-handover", os.MFD_CLOEXEC)
            except OSError as error:
                log.error("no memory to hand state over in: %s", error)
                return None
        return Path(f"/proc/{os.getpid()}/fd/{self._pieces[slot]}")

    def release(self, replica: int) -> None:
        """Give back what a replica's ranks have left: nobody goes back to it."""
        for slot, piece in self._pieces.items():
            if slot[0] == replica:
                os.ftruncate(piece, 0)
