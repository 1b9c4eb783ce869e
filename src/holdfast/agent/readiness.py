"""Owns what a node waits for before it starts an attempt's ranks: room for their logs, and GPUs that are free.

It waits for room as long as it takes, since a rank that cannot write dies at its first word. It waits for GPUs only
after an attempt of its own, whose memory the driver may still be giving back, and not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.agent.gpu import Occupant, occupants
from holdfast.events.orders import StartRanks
from holdfast.findings import Fault, Finding, Severity
from holdfast.shortage import holding_up, lacking

LOOK_S = 1.0
"""Seconds between two looks."""

FREE_S = 20.0
"""Longest to wait for memory of an earlier attempt's ranks to be free; a driver takes a second or two."""


class Readiness:
    """Waits for one attempt; `find` takes what is to be said meanwhile, `abandoned` ends every wait."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        find: Callable[[Finding], object],
        abandoned: asyncio.Event,
        patient: bool = False,
    ) -> None:
        self._order = order
        self._where = f"node{node}"
        self._find = find
        self._abandoned = abandoned
        self._patient = patient
        """Whether GPUs are waited for as long as it takes: nothing is to be started yet."""

    async def wait(self) -> None:
        """Return when ranks can be started, or should not be any more."""
        await self._room_for_logs()
        await self._free_gpus()

    async def _room_for_logs(self) -> None:
        folder = Path(self._order.ranks[0].log).parent
        said = False
        while not self._abandoned.is_set():
            refusal = lacking(folder)
            if refusal is None:
                return
            if not said:
                self._find(holding_up(refusal, f"the ranks of {self._where} wait for room for their logs", folder))
                said = True
            await self._pause()

    async def _free_gpus(self) -> None:
        rank = self._order.launches[0]
        visible = rank.env.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
        give_up_at = time.monotonic() + (FREE_S if self._order.attempt > 0 else 0.0)
        said = False
        while found := await occupants(visible):
            if time.monotonic() >= give_up_at and not said:
                self._find(_occupied(found, self._where, patient=self._patient))
                said = True
            if said and not self._patient:
                return
            await self._pause()
            if self._abandoned.is_set():
                return

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._abandoned.wait(), LOOK_S)


def _occupied(found: tuple[Occupant, ...], where: str, *, patient: bool) -> Finding:
    so = f"{where} takes no other's place until it is free" if patient else "ranks are started beside them"
    gpus = ", ".join(dict.fromkeys(str(one.gpu.index) for one in found))
    seen = [str(one.pid) for one in found if one.pid is not None]
    hidden = "A process that cannot be seen is in another container, or dead and not let go: `fuser -v /dev/nvidia*` on"
    remedy = f"End it if it is yours: `kill {' '.join(seen)}`." if seen else f"{hidden} the machine, or reset the GPU."
    return Finding(
        code="gpu-occupied",
        severity=Severity.WARNING,
        what=f"memory of GPU {gpus} is in use by others; {so}",
        where=where,
        evidence=tuple(str(one) for one in found[:8]),
        remedy=remedy,
        fault=Fault.CLUSTER,
    )
