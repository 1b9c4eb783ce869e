"""Injects the faults that no agent can, on every target: into the controller, node networks and disks.

One function per row of job/fault_catalog.py. A separate process ends a fault with a duration; it outlives the
controller and ends with the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from holdfast.clock import shift_wall_clock
from holdfast.errors import ExitCode, failure
from holdfast.events import FaultAction, FaultRequested, FaultTarget
from holdfast.host.processes import send_signal, stop_processes, undo_later
from holdfast.job.fault_attribution import BALLAST
from holdfast.launch.local.run_network import RunNetwork

MAX_FILL_BYTES = 4 << 30
"""Most free space that a fault fills: a larger disk is likely shared with other users."""


class ControllerFaults(Struct, frozen=True, kw_only=True):
    """Injects faults into this process, its disks, the lighthouse, or a node's network."""

    networks: RunNetwork
    folders: Mapping[FaultTarget, Path]
    """A folder on each disk that can be filled."""
    lighthouse_pid: Callable[[], int] = int
    """The pid of the lighthouse; 0 while there is none."""

    async def __call__(self, drill: FaultRequested) -> None:
        """Inject a fault; raises HoldfastError if it cannot be injected here."""
        await asyncio.to_thread(INJECT_FUNCTIONS[drill.action, drill.target], self, drill)

    def clear(self) -> None:
        """Remove what would outlive the run."""
        for folder in self.folders.values():
            (folder / BALLAST).unlink(missing_ok=True)


def _kill_controller(_here: ControllerFaults, _drill: FaultRequested) -> None:
    send_signal(os.getpid(), signal.SIGKILL)


def _stop_controller(_here: ControllerFaults, drill: FaultRequested) -> None:
    stop_processes([os.getpid()], drill.for_s)


def _kill_lighthouse(here: ControllerFaults, _drill: FaultRequested) -> None:
    if pid := here.lighthouse_pid():
        send_signal(pid, signal.SIGKILL)


def _stop_lighthouse(here: ControllerFaults, drill: FaultRequested) -> None:
    if pid := here.lighthouse_pid():
        stop_processes([pid], drill.for_s)


def _partition_node(here: ControllerFaults, drill: FaultRequested) -> None:
    here.networks.partition(drill.index, drill.for_s)


def _skew_controller(_here: ControllerFaults, drill: FaultRequested) -> None:
    shift_wall_clock(drill.amount or 0.0)


def _fill_disk(here: ControllerFaults, drill: FaultRequested) -> None:
    folder = here.folders[drill.target]
    folder.mkdir(parents=True, exist_ok=True)
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes > MAX_FILL_BYTES:
        raise failure(
            "fault-unavailable",
            f"the disk of {folder} has {free_bytes:,} bytes free, and a drill fills no more than {MAX_FILL_BYTES:,}",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=str(folder),
            remedy="Try it on a small one: `mount -t tmpfs -o size=64m none FOLDER`.",
        )
    ballast = folder / BALLAST
    with undo_later(drill.for_s, "rm", "-f", str(ballast)), ballast.open("ab") as file:
        while free_bytes >= disk.f_frsize:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free_bytes)
            except OSError:
                free_bytes //= 2


INJECT_FUNCTIONS: Mapping[tuple[FaultAction, FaultTarget], Callable[[ControllerFaults, FaultRequested], None]] = {
    (FaultAction.KILL, FaultTarget.CONTROLLER): _kill_controller,
    (FaultAction.STOP, FaultTarget.CONTROLLER): _stop_controller,
    (FaultAction.CLOCK_SKEW, FaultTarget.CONTROLLER): _skew_controller,
    (FaultAction.KILL, FaultTarget.LIGHTHOUSE): _kill_lighthouse,
    (FaultAction.STOP, FaultTarget.LIGHTHOUSE): _stop_lighthouse,
    (FaultAction.PARTITION, FaultTarget.NODE): _partition_node,
    (FaultAction.FILL, FaultTarget.RUN_DIR): _fill_disk,
    (FaultAction.FILL, FaultTarget.CHECKPOINTS): _fill_disk,
}
"""The rows of job/fault_catalog.py that are implemented here."""
