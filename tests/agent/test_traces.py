"""Files of a profile are uploaded once, removed, and reported together."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.agent.traces import RankTraces
from holdfast.clock import Clock
from holdfast.events import TraceKept
from holdfast.protocol.orders import ProfileSteps, StartRanks
from holdfast.protocol.rank_messages import TraceWritten, memory_path, trace_path
from holdfast.run_dir import TRACE_NAME


def kept(folder: Path, message: TraceWritten, *, refused: str = "") -> tuple[TraceKept, list[str]]:
    """What is reported and uploaded of the files that rank 0 has written."""
    uploaded: list[str] = []

    async def upload(name: str, path: Path) -> str:
        assert path.exists()
        uploaded.append(name)
        return "the disk is full" if refused and refused in name else ""

    async def keep() -> TraceKept:
        reported: asyncio.Queue[TraceKept] = asyncio.Queue()

        def send(event: TraceKept) -> int:
            reported.put_nowait(event)
            return 1

        order = StartRanks(replica=0, attempt=2, ranks=(), env={})
        traces = RankTraces(order, node=1, folder=folder, clock=Clock(), upload=upload, send=send)
        request = traces.request(ProfileSteps(memory=True))
        assert request.memory
        for path in (trace_path(request.traces, 7, 0), memory_path(request.traces, 7, 0)):
            Path(path).write_bytes(b"x")
        traces.on_written(0, message)
        traces.on_written(0, message)
        return await asyncio.wait_for(reported.get(), 10.0)

    return asyncio.run(keep()), uploaded


def test_trace_and_snapshot_are_uploaded_and_removed(tmp_path: Path) -> None:
    event, uploaded = kept(tmp_path, TraceWritten(step=7, kept=1, memory=True))
    assert uploaded == ["attempt-2-step-7/rank-0.json.gz", "attempt-2-step-7/rank-0-memory.pickle.gz"]
    assert all(TRACE_NAME.fullmatch(name) for name in uploaded)
    assert [event.file, event.memory_file] == [f"traces/{name}" for name in uploaded]
    assert [*tmp_path.iterdir()] == []


def test_snapshot_that_cannot_be_kept_does_not_cost_the_trace(tmp_path: Path) -> None:
    event, _ = kept(tmp_path, TraceWritten(step=7, kept=1, memory=True), refused="memory")
    assert (event.failure, event.memory_file, event.memory_failure) == ("", "", "the disk is full")
    assert event.file


def test_rank_without_a_snapshot_tells_why(tmp_path: Path) -> None:
    event, uploaded = kept(tmp_path, TraceWritten(step=7, kept=1, memory_failure="no GPU"))
    assert len(uploaded) == 1
    assert (event.memory_file, event.memory_failure) == ("", "no GPU")
