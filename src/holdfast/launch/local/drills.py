"""Owns the drills that no agent can carry out on the local back end: of the controller itself and of nodes' networks.

One function a row of job/drills.py. What a drill ends by itself is ended by a process of its own, which outlives the
controller and goes with the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.clock import skew
from holdfast.events import DrillAction, DrillRequested, DrillTarget
from holdfast.launch.local.isolation import Isolation
from holdfast.launch.local.processes import pause, send


@dataclass(frozen=True, kw_only=True)
class OutsideDrills:
    """Breaks the process it is called in, or the network of a node."""

    isolation: Isolation

    async def __call__(self, drill: DrillRequested) -> None:
        """Carry a drill out; raises HoldfastError where the place cannot."""
        await asyncio.to_thread(_ACTS[drill.action, drill.target], self, drill)


def _kill_controller(_here: OutsideDrills, _drill: DrillRequested) -> None:
    send(os.getpid(), signal.SIGKILL)


def _stop_controller(_here: OutsideDrills, drill: DrillRequested) -> None:
    pause([os.getpid()], drill.for_s)


def _partition_node(here: OutsideDrills, drill: DrillRequested) -> None:
    here.isolation.partition(drill.index, drill.for_s)


def _skew_controller(_here: OutsideDrills, drill: DrillRequested) -> None:
    skew(drill.amount or 0.0)


_ACTS: Mapping[tuple[DrillAction, DrillTarget], Callable[[OutsideDrills, DrillRequested], None]] = {
    (DrillAction.KILL, DrillTarget.CONTROLLER): _kill_controller,
    (DrillAction.STOP, DrillTarget.CONTROLLER): _stop_controller,
    (DrillAction.SKEW, DrillTarget.CONTROLLER): _skew_controller,
    (DrillAction.PARTITION, DrillTarget.NODE): _partition_node,
}

ROWS = frozenset(_ACTS)
"""The rows of job/drills.py that are carried out here."""
