"""Owns what a lab writes down about itself, so that whoever comes later can show it or end it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.host.processes import ProcessId
from lab.cache import locked
from lab.kubelet.nodes import NodeSpec

SUPERVISOR = "supervisor"
LASTING_S = 30.0
"""A program that has lived longer does its work; what ends it is not likely to end the next one at once."""
HOPELESS = 6
"""Endings in a row, with some 8 s of pauses between, after which a program is not waited for."""
_FILE = "lab.json"


class Endings(msgspec.Struct, frozen=True, kw_only=True):
    """How a program has ended that nobody told to."""

    times: int = 0
    in_a_row: int = 0
    """Those since it has last lasted."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a lab is made of."""

    ports: dict[str, int]
    data: str
    """etcd's folder."""
    nodes: tuple[NodeSpec, ...]
    tied: bool
    """Whether it dies with whoever started it."""
    processes: dict[str, ProcessId] = {}
    """By the name of the program."""
    endings: dict[str, Endings] = {}
    """By the name of the program."""
    stopped: frozenset[str] = frozenset()
    """Programs that are to stay down until somebody starts them."""
    ready: bool = False
    """Whether its start came to its end."""

    def ended(self, name: str) -> Endings:
        return self.endings.get(name, Endings())

    def once_more(self, name: str) -> Endings:
        """How a program has ended, now that it has again."""
        before = self.ended(name)
        return Endings(times=before.times + 1, in_a_row=1 if _lasted(self.processes[name]) else before.in_a_row + 1)

    def lives(self, name: str) -> bool:
        return name in self.processes and self.processes[name].alive

    def keeps_ending(self, name: str) -> bool:
        """Whether a program is not to be waited for: it ends time and again, or nobody starts it again."""
        if self.lives(name):
            return self.ended(name).in_a_row >= HOPELESS and not _lasted(self.processes[name])
        return self.ended(name).in_a_row >= HOPELESS or not self.lives(SUPERVISOR)

    def with_process(self, name: str, process: ProcessId, endings: Endings | None = None) -> State:
        """A program has been started: by somebody, or again after these endings."""
        ended = endings or Endings(times=self.ended(name).times)
        return msgspec.structs.replace(
            self,
            processes=self.processes | {name: process},
            endings=self.endings | {name: ended},
            stopped=self.stopped - {name},
        )

    def with_stopped(self, name: str) -> State:
        """A program is to stay down."""
        return msgspec.structs.replace(self, stopped=self.stopped | {name})


def load(folder: Path) -> State | None:
    """What the lab in this folder is made of; None where there is none, or one of another version."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=State)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def save(folder: Path, state: State) -> None:
    """Write it down, whole or not at all."""
    fresh = folder / f"{_FILE}.new"
    fresh.write_bytes(msgspec.json.encode(state))
    fresh.replace(folder / _FILE)


def change(folder: Path, by: Callable[[State], State]) -> State:
    """Change it; nobody else does meanwhile. FileNotFoundError where there is none any more."""
    with locked(folder / f"{_FILE}.lock"):
        known = load(folder)
        if known is None:
            raise FileNotFoundError(folder / _FILE)
        fresh = by(known)
        save(folder, fresh)
        return fresh


def _lasted(process: ProcessId) -> bool:
    """Whether a process that lives, or has just ended, has done so long after its start."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / os.sysconf("SC_CLK_TCK")
    return bool(process.started) and age_s > LASTING_S
