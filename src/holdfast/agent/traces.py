"""Uploads the traces that a node's ranks write during a profile to the controller."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from holdfast.clock import Clock
from holdfast.events import TraceKept
from holdfast.host.processes import die_with_parent
from holdfast.protocol import routes
from holdfast.protocol.orders import ProfileSteps, StartRanks
from holdfast.protocol.rank_messages import ProfileStepsNow, TraceWritten, memory_path, trace_path
from holdfast.run_dir import trace_name

Upload = Callable[[str, Path], Coroutine[None, None, str]]
"""Uploads a file under a name; returns why that failed, or nothing."""


class RankTraces:
    """The traces of one attempt's ranks on this node, one per rank and profile."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        folder: Path,
        clock: Clock,
        upload: Upload,
        send: Callable[[TraceKept], int],
    ) -> None:
        self._order = order
        self._node = node
        self._start = f"{folder}/trace-replica-{order.replica}-attempt-{order.attempt}-"
        self._clock = clock
        self._upload = upload
        self._send = send
        self._requested = False
        self._written = set[int]()
        """Ranks that have written one since the last request."""
        self._tasks = set[asyncio.Task[None]]()

    def request(self, order: ProfileSteps) -> ProfileStepsNow:
        """The request for the ranks; without chosen ranks, only replica 0 keeps traces."""
        first = self._order.replica * self._order.world_size
        ranks = tuple(rank - first for rank in order.ranks if 0 <= rank - first < self._order.world_size)
        if not (ranks if order.ranks else self._order.replica == 0):
            return ProfileStepsNow()
        self._requested, self._written = True, set()
        return ProfileStepsNow(traces=self._start, ranks=ranks, memory=order.memory)

    def on_written(self, rank: int, message: TraceWritten) -> None:
        """A rank has written its trace: upload it."""
        if not self._requested or rank in self._written:
            return
        self._written.add(rank)
        task = asyncio.ensure_future(self._keep(rank, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, rank: int, message: TraceWritten) -> None:
        replicas = int(self._order.env.get("HOLDFAST_REPLICA_COUNT", "1"))
        name = trace_name(message.step, rank, self._order.attempt, self._order.replica, replicas)
        memory = name.removesuffix(".json.gz") + "-memory.pickle.gz"
        failure, memory_failure = message.failure[:500], message.memory_failure[:500]
        if not failure:
            failure = await self._upload_once(name, Path(trace_path(self._start, message.step, rank)))
        if message.memory:
            memory_failure = await self._upload_once(memory, Path(memory_path(self._start, message.step, rank)))
        self._send(
            TraceKept(
                at=self._clock(),
                node=self._node,
                replica=self._order.replica,
                attempt=self._order.attempt,
                rank=rank,
                step=message.step,
                kept=message.kept,
                step_clock=message.step_clock,
                file="" if failure else f"traces/{name}",
                failure=failure,
                memory_file=f"traces/{memory}" if message.memory and not memory_failure else "",
                memory_failure=memory_failure,
            )
        )

    async def _upload_once(self, name: str, path: Path) -> str:
        """Upload a file and remove it; returns why that failed, or nothing."""
        failure = await self._upload(name, path)
        path.unlink(missing_ok=True)
        return failure


async def upload_trace(url: str, file: Path, *, token: str, ca: Path | None) -> str:
    """Upload a file in a separate process; returns why that failed, or nothing."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "holdfast.agent.trace_upload", url, str(file)),
        *(("--ca", str(ca)) if ca else ()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    said, _ = await process.communicate(token.encode())
    return "" if process.returncode == 0 else said.decode(errors="replace").strip()[:500] or "the upload failed"


def trace_url(controller: str, name: str) -> str:
    """Where the controller stores a trace."""
    return routes.http_url(controller, routes.TRACES + name)
