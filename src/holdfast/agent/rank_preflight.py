"""Delays an attempt's ranks until the disk has space for their logs and their GPUs are free.

It waits for disk space without limit, since a rank that cannot write fails at its first line. It waits for GPUs for
`GPU_FREE_TIMEOUT_S` seconds, and only after an earlier attempt, whose memory the driver may still be freeing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.agent.gpu_memory import GpuMemoryUse, foreign_memory_use
from holdfast.findings import Finding, Owner, Severity
from holdfast.os_errors import probe_disk, waiting_finding
from holdfast.protocol.orders import StartRanks

POLL_S = 1.0
"""Seconds between two polls."""

GPU_FREE_TIMEOUT_S = 20.0
"""Longest wait until the memory of an earlier attempt's ranks is free; a driver takes a second or two."""


class RankPreflight:
    """Waits before one attempt; `cancelled` ends every wait."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        report_finding: Callable[[Finding], object],
        cancelled: asyncio.Event,
        wait_forever: bool = False,
    ) -> None:
        self._order = order
        self._where = f"node{node}"
        self._report_finding = report_finding
        self._cancelled = cancelled
        self._wait_forever = wait_forever
        """Whether to wait for GPUs without limit, because no start has been ordered yet."""

    async def wait(self) -> None:
        """Return when ranks can start, or when the start was cancelled."""
        await self._wait_disk_space()
        await self._wait_free_gpus()

    async def _wait_disk_space(self) -> None:
        folder = Path(self._order.ranks[0].log).parent
        reported = False
        while not self._cancelled.is_set():
            refusal = probe_disk(folder)
            if refusal is None:
                return
            if not reported:
                self._report_finding(
                    waiting_finding(refusal, f"the ranks of {self._where} wait for room for their logs", folder)
                )
                reported = True
            await self._sleep()

    async def _wait_free_gpus(self) -> None:
        rank = self._order.launches[0]
        visible = rank.env.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
        give_up_at = time.monotonic() + (GPU_FREE_TIMEOUT_S if self._order.attempt > 0 else 0.0)
        reported = False
        while found := await foreign_memory_use(visible):
            if time.monotonic() >= give_up_at and not reported:
                self._report_finding(_gpu_occupied(found, self._where, wait_forever=self._wait_forever))
                reported = True
            if reported and not self._wait_forever:
                return
            await self._sleep()
            if self._cancelled.is_set():
                return

    async def _sleep(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), POLL_S)


def _gpu_occupied(found: tuple[GpuMemoryUse, ...], where: str, *, wait_forever: bool) -> Finding:
    so = f"{where} replaces no node until it is free" if wait_forever else "ranks start nevertheless"
    gpus = ", ".join(dict.fromkeys(str(one.gpu.index) for one in found))
    seen = [str(one.pid) for one in found if one.pid is not None]
    hidden = "A process that cannot be seen is in another container, or dead and not let go: `fuser -v /dev/nvidia*` on"
    remedy = f"End it if it is yours: `kill {' '.join(seen)}`." if seen else f"{hidden} the machine, or reset the GPU."
    return Finding(
        code="gpu-in-use",
        severity=Severity.WARNING,
        what=f"memory of GPU {gpus} is in use by others; {so}",
        where=where,
        evidence=tuple(str(one) for one in found[:8]),
        remedy=remedy,
        owner=Owner.CLUSTER,
    )
