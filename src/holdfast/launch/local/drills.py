"""Owns the drills that no agent can carry out, wherever a run is: of the controller, nodes' networks and disks.

One function a row of job/drills.py. What a drill ends by itself is ended by a process of its own, which outlives the
controller and goes with the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.clock import skew
from holdfast.errors import ExitCode, failure
from holdfast.events import DrillAction, DrillRequested, DrillTarget
from holdfast.host.processes import later, pause, send
from holdfast.job.drilled import BALLAST
from holdfast.launch.local.isolation import Networks

MOST_BYTES = 4 << 30
"""Of free space that a drill will take: more is likely to be other people's."""


@dataclass(frozen=True, kw_only=True)
class OutsideDrills:
    """Breaks the process it is called in, or the network of a node."""

    networks: Networks
    folders: Mapping[DrillTarget, Path]
    """Where the disks are that can be filled."""
    quorum: Callable[[], int] = int
    """The process of the quorum service; 0 while there is none."""

    async def __call__(self, drill: DrillRequested) -> None:
        """Carry a drill out; raises HoldfastError where the place cannot."""
        await asyncio.to_thread(_ACTS[drill.action, drill.target], self, drill)

    def clear(self) -> None:
        """End what would outlive the run."""
        for folder in self.folders.values():
            (folder / BALLAST).unlink(missing_ok=True)


def _kill_controller(_here: OutsideDrills, _drill: DrillRequested) -> None:
    send(os.getpid(), signal.SIGKILL)


def _stop_controller(_here: OutsideDrills, drill: DrillRequested) -> None:
    pause([os.getpid()], drill.for_s)


def _kill_quorum(here: OutsideDrills, _drill: DrillRequested) -> None:
    if pid := here.quorum():
        send(pid, signal.SIGKILL)


def _stop_quorum(here: OutsideDrills, drill: DrillRequested) -> None:
    if pid := here.quorum():
        pause([pid], drill.for_s)


def _partition_node(here: OutsideDrills, drill: DrillRequested) -> None:
    here.networks.partition(drill.index, drill.for_s)


def _skew_controller(_here: OutsideDrills, drill: DrillRequested) -> None:
    skew(drill.amount or 0.0)


def _fill_disk(here: OutsideDrills, drill: DrillRequested) -> None:
    folder = here.folders[drill.target]
    folder.mkdir(parents=True, exist_ok=True)
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes > MOST_BYTES:
        raise failure(
            "drill-unavailable",
            f"the disk of {folder} has {free_bytes:,} bytes free, and a drill fills no more than {MOST_BYTES:,}",
            exit_code=ExitCode.IMPOSSIBLE,
            where=str(folder),
            remedy="Try it on a small one: `mount -t tmpfs -o size=64m none FOLDER`.",
        )
    ballast = folder / BALLAST
    if drill.for_s is not None:
        later(drill.for_s, "rm", "-f", str(ballast))
    with ballast.open("ab") as file:
        while free_bytes >= disk.f_frsize:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free_bytes)
            except OSError:
                free_bytes //= 2


_ACTS: Mapping[tuple[DrillAction, DrillTarget], Callable[[OutsideDrills, DrillRequested], None]] = {
    (DrillAction.KILL, DrillTarget.CONTROLLER): _kill_controller,
    (DrillAction.STOP, DrillTarget.CONTROLLER): _stop_controller,
    (DrillAction.SKEW, DrillTarget.CONTROLLER): _skew_controller,
    (DrillAction.KILL, DrillTarget.QUORUM): _kill_quorum,
    (DrillAction.STOP, DrillTarget.QUORUM): _stop_quorum,
    (DrillAction.PARTITION, DrillTarget.NODE): _partition_node,
    (DrillAction.FILL, DrillTarget.RUN_FOLDER): _fill_disk,
    (DrillAction.FILL, DrillTarget.CHECKPOINTS): _fill_disk,
}

ROWS = frozenset(_ACTS)
"""The rows of job/drills.py that are carried out here."""
