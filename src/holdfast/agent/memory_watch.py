"""Watches the memory of a node's ranks, and of their GPUs, for growth that ends in out-of-memory.

memory_pressure.py warns when memory is nearly used up; this warns up to an hour earlier, and names the rank. It samples
ranks that make steps, without their children such as DataLoader workers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.findings import Finding, Severity, replica_suffix
from holdfast.protocol.rank_messages import GpuMemory
from holdfast.watch.memory_growth import Growth, MemoryGrowthDetector
from holdfast.watch.memory_pressure import read_tightest

PERIOD_S = 0.5
"""Seconds between two samples: 0.4 ms of CPU time with eight ranks."""
SETTLED_STEPS = 10
"""Steps of a rank after which its memory is watched: the first ones allocate what all need."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """The ranks of one attempt on this node."""

    def __init__(
        self,
        *,
        node: int,
        replica: int,
        pids: Callable[[], Mapping[int, int]],
        steps_of: Callable[[int], int],
        report_finding: Callable[[Finding], None],
        clock: Callable[[], float],
    ) -> None:
        self._node = node
        self._replica = replica
        self._pids = pids
        self._steps_of = steps_of
        self._report_finding = report_finding
        self._clock = clock
        self._of_hosts: dict[int, MemoryGrowthDetector] = {}
        self._of_gpus: dict[int, MemoryGrowthDetector] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sample until `stop`."""
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Stop sampling."""
        if self._task is not None:
            self._task.cancel()

    def sample(self) -> None:
        """Sample the memory of every rank that makes steps."""
        settled = {rank: pid for rank, pid in self._pids().items() if self._steps_of(rank) >= SETTLED_STEPS}
        if not settled:
            return
        tightest = read_tightest()
        for rank, pid in settled.items():
            used = _own_bytes(pid)
            detector = self._of_hosts.setdefault(rank, MemoryGrowthDetector())
            if used and (growth := detector.add(self._clock(), used=used, free=tightest.free_bytes)):
                self._report_finding(self._finding(rank, growth, f"the limit of {tightest.where}"))

    def add_gpu(self, rank: int, memory: GpuMemory) -> None:
        """Add what tensors of a rank use of its GPU."""
        detector = self._of_gpus.setdefault(rank, MemoryGrowthDetector())
        if self._steps_of(rank) >= SETTLED_STEPS and (
            growth := detector.add(self._clock(), used=memory.used_bytes, free=memory.free_bytes)
        ):
            self._report_finding(self._finding(rank, growth, "its GPU's memory", of=" of its GPU"))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.sample()

    def _finding(self, rank: int, growth: Growth, limit: str, *, of: str = "") -> Finding:
        who = f"rank {rank}{replica_suffix(self._replica)} on node{self._node}"
        return Finding(
            code="memory-growing",
            severity=Severity.WARNING,
            what=f"the memory{of} of {who} grows steadily and will be used up in {_duration(growth.left_s)}",
            where=who,
            evidence=(
                f"{growth.bytes_per_s * 60 / 2**20:,.0f} MiB per minute over the last {_duration(growth.window_s)}",
                f"{growth.used / 2**30:.2f} GiB in use, {growth.free / 2**30:.2f} GiB left to {limit}",
            ),
            remedy="Find what is kept of each step: losses that are tensors, graphs, caches without a limit. "
            "`holdfast checkpoint` saves the state before memory runs out.",
        )


def _own_bytes(pid: int) -> int:
    """Resident memory that belongs to this process alone: no files, no shared memory."""
    try:
        resident, shared = (Path(f"/proc/{pid}/statm").read_text().split())[1:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
