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
STABLE_AFTER_S = 30.0
"""A program that has lived longer does its work; what ends it is not likely to end the next one at once."""
MAX_CRASHES_IN_A_ROW = 6
"""Endings in a row, with some 8 s of pauses between, after which a program is not waited for."""
_FILE = "lab.json"


class CrashCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How a program has ended that nobody told to."""

    total: int = 0
    in_a_row: int = 0
    """Those since it has last lasted."""


class LabState(msgspec.Struct, frozen=True, kw_only=True):
    """What a lab is made of."""

    ports: dict[str, int]
    data: str
    """etcd's folder."""
    nodes: tuple[NodeSpec, ...]
    dies_with_parent: bool
    """Whether it dies with whoever started it."""
    processes: dict[str, ProcessId] = {}
    """By the name of the program."""
    crashes: dict[str, CrashCounts] = {}
    """By the name of the program."""
    stopped: frozenset[str] = frozenset()
    """Programs that are to stay down until somebody starts them."""
    ready: bool = False
    """Whether its start came to its end."""

    def crash_counts(self, name: str) -> CrashCounts:
        return self.crashes.get(name, CrashCounts())

    def count_crash(self, name: str) -> CrashCounts:
        """How a program has ended, now that it has again."""
        before = self.crash_counts(name)
        return CrashCounts(
            total=before.total + 1, in_a_row=1 if _was_stable(self.processes[name]) else before.in_a_row + 1
        )

    def is_alive(self, name: str) -> bool:
        return name in self.processes and self.processes[name].alive

    def is_crash_looping(self, name: str) -> bool:
        """Whether a program is not to be waited for: it ends time and again, or nobody starts it again."""
        if self.is_alive(name):
            return self.crash_counts(name).in_a_row >= MAX_CRASHES_IN_A_ROW and not _was_stable(self.processes[name])
        return self.crash_counts(name).in_a_row >= MAX_CRASHES_IN_A_ROW or not self.is_alive(SUPERVISOR)

    def with_process(self, name: str, process: ProcessId, endings: CrashCounts | None = None) -> LabState:
        """A program has been started: by somebody, or again after these endings."""
        ended = endings or CrashCounts(total=self.crash_counts(name).total)
        return msgspec.structs.replace(
            self,
            processes=self.processes | {name: process},
            crashes=self.crashes | {name: ended},
            stopped=self.stopped - {name},
        )

    def with_stopped(self, name: str) -> LabState:
        """A program is to stay down."""
        return msgspec.structs.replace(self, stopped=self.stopped | {name})


def load(folder: Path) -> LabState | None:
    """What the lab in this folder is made of; None where there is none, or one of another version."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=LabState)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def save(folder: Path, state: LabState) -> None:
    """Write it down, whole or not at all."""
    fresh = folder / f"{_FILE}.new"
    fresh.write_bytes(msgspec.json.encode(state))
    fresh.replace(folder / _FILE)


def update(folder: Path, edit: Callable[[LabState], LabState]) -> LabState:
    """Change it; nobody else does meanwhile. FileNotFoundError where there is none any more."""
    with locked(folder / f"{_FILE}.lock"):
        known = load(folder)
        if known is None:
            raise FileNotFoundError(folder / _FILE)
        fresh = edit(known)
        save(folder, fresh)
        return fresh


def _was_stable(process: ProcessId) -> bool:
    """Whether a process that lives, or has just ended, has done so long after its start."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / os.sysconf("SC_CLK_TCK")
    return bool(process.started) and age_s > STABLE_AFTER_S
