"""The lab's state file, from which a later process can show or stop the lab."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.host.processes import ProcessId
from holdfast.launch.local.netns import NetnsInterface
from lab.cache import locked
from lab.kubelet.nodes import NodeSpec

SUPERVISOR = "supervisor"
NODE_LOST_AFTER_S = 10
STABLE_AFTER_S = 30.0
"""A program that has run longer is stable: the cause of a later exit is unlikely to stop its successor."""
MAX_CRASHES_IN_A_ROW = 6
"""Crashes in a row, with about 8 s of pauses between them, after which a program counts as crash-looping."""
_FILE = "lab.json"


class CrashCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How often a program has exited unexpectedly."""

    total: int = 0
    in_a_row: int = 0
    """Crashes since it was last stable."""


class LabState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a lab."""

    ports: dict[str, int]
    data: str
    """etcd's folder."""
    nodes: tuple[NodeSpec, ...]
    interfaces: tuple[NetnsInterface, ...] = (NetnsInterface(),)
    """Network interfaces of every pod."""
    node_lost_after_s: int = NODE_LOST_AFTER_S
    """Seconds without a heartbeat after which Kubernetes considers a node lost."""
    kubelet_python: tuple[str, ...] = (sys.executable,)
    """The command that runs the kubelet as Python would."""
    dies_with_parent: bool
    """Whether the lab ends with the process that started it."""
    processes: dict[str, ProcessId] = {}
    """Keyed by program."""
    crashes: dict[str, CrashCounts] = {}
    """Keyed by program."""
    stopped: frozenset[str] = frozenset()
    """Programs that stay down until a user starts them."""
    ready: bool = False
    """Whether the start has completed."""

    def crash_counts(self, name: str) -> CrashCounts:
        return self.crashes.get(name, CrashCounts())

    def count_crash(self, name: str) -> CrashCounts:
        """The counts of a program after another crash."""
        before = self.crash_counts(name)
        return CrashCounts(
            total=before.total + 1, in_a_row=1 if _was_stable(self.processes[name]) else before.in_a_row + 1
        )

    def is_alive(self, name: str) -> bool:
        return name in self.processes and self.processes[name].alive

    def is_crash_looping(self, name: str) -> bool:
        """Whether waiting for a program is useless: it crashes repeatedly, or is down without a supervisor."""
        if self.is_alive(name):
            return self.crash_counts(name).in_a_row >= MAX_CRASHES_IN_A_ROW and not _was_stable(self.processes[name])
        return self.crash_counts(name).in_a_row >= MAX_CRASHES_IN_A_ROW or not self.is_alive(SUPERVISOR)

    def with_process(self, name: str, process: ProcessId, endings: CrashCounts | None = None) -> LabState:
        """State after a program's start: by a user, or as a restart after `endings`."""
        ended = endings or CrashCounts(total=self.crash_counts(name).total)
        return msgspec.structs.replace(
            self,
            processes=self.processes | {name: process},
            crashes=self.crashes | {name: ended},
            stopped=self.stopped - {name},
        )

    def with_stopped(self, name: str) -> LabState:
        """State in which a program stays down."""
        return msgspec.structs.replace(self, stopped=self.stopped | {name})


def load(folder: Path) -> LabState | None:
    """The state of the lab in this folder; None if there is none, or one of another version."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=LabState)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def save(folder: Path, state: LabState) -> None:
    """Write the state atomically."""
    fresh = folder / f"{_FILE}.new"
    fresh.write_bytes(msgspec.json.encode(state))
    fresh.replace(folder / _FILE)


def update(folder: Path, edit: Callable[[LabState], LabState]) -> LabState:
    """Change the state under a lock; raise FileNotFoundError if there is none."""
    with locked(folder / f"{_FILE}.lock"):
        known = load(folder)
        if known is None:
            raise FileNotFoundError(folder / _FILE)
        fresh = edit(known)
        save(folder, fresh)
        return fresh


def _was_stable(process: ProcessId) -> bool:
    """Whether a process has run for long, or did before its exit."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / os.sysconf("SC_CLK_TCK")
    return bool(process.started) and age_s > STABLE_AFTER_S
