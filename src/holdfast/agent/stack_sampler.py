"""Dumps the stacks of one attempt's ranks several times while they run, and sends each round of dumps.

py-spy pauses a rank while it reads it, and gets 5 s at most. Native frames are not read: that takes ten times as long,
and equal calls would differ by what a library does inside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.agent.stack_dump import StackDump, dump_stacks
from holdfast.host.processes import state_letter
from holdfast.protocol.orders import DumpStacks, RankStack, StackRound, StartRanks

MAX_CONCURRENT_DUMPS = 4
"""Most concurrent stack dumps on a node; py-spy needs most of a core."""


def requested_stacks_name(replica: int, attempt: int, rank: int) -> str:
    """Name of the file with the latest stacks of a rank that were requested."""
    return f"stacks-requested-replica-{replica}-attempt-{attempt}-rank-{rank}.txt"


class StackSampler:
    """The ranks of one attempt on this node."""

    def __init__(
        self,
        start: StartRanks,
        *,
        node: int,
        folder: Path,
        pids: Callable[[], Mapping[int, int]],
        send: Callable[[StackRound], object],
    ) -> None:
        """`pids` returns the pid of each running rank."""
        self._replica, self._attempt = start.replica, start.attempt
        self._node, self._folder = node, folder
        self._pids, self._send = pids, send
        self._latest = 0.0
        """The request of the latest rounds."""
        self._task: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_DUMPS)

    def start(self, order: DumpStacks) -> None:
        """Begin the rounds of an order, unless they have begun; a newer order ends those of an older one."""
        if order.requested_at > self._latest:
            self._latest = order.requested_at
            self.stop()
            self._task = asyncio.ensure_future(self._sample(order))

    def stop(self) -> None:
        """End the rounds."""
        if self._task is not None:
            self._task.cancel()

    async def _sample(self, order: DumpStacks) -> None:
        began = time.monotonic()
        for number in range(order.rounds):
            await asyncio.sleep(max(0.0, began + number * order.interval_s - time.monotonic()))
            pids = self._pids()
            dumps = await asyncio.gather(*(self._dump(rank, pid) for rank, pid in pids.items()))
            self._send(
                StackRound(
                    node=self._node,
                    replica=self._replica,
                    attempt=self._attempt,
                    requested_at=order.requested_at,
                    number=number,
                    rounds=order.rounds,
                    stacks=tuple(
                        RankStack(rank=rank, frames=dump.frames) for rank, dump in zip(pids, dumps, strict=True)
                    ),
                )
            )

    async def _dump(self, rank: int, pid: int) -> StackDump:
        into = self._folder / requested_stacks_name(self._replica, self._attempt, rank)
        async with self._slots:
            return await dump_stacks(pid, into, stopped=state_letter(pid) == "T")
