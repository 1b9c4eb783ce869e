"""Traces that agents upload: whole, private, in their place, and no more than a run may hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.control.trace_store import TraceRefused, TraceStore
from holdfast.run_dir import trace_name

NAME = trace_name(20, 3, attempt=0)


async def blocks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def test_trace_is_stored_whole_and_private(tmp_path: Path) -> None:
    asyncio.run(TraceStore(tmp_path / "traces").store(NAME, blocks(b"ab", b"c")))
    (path,) = tmp_path.glob("traces/*/*")
    assert (path.relative_to(tmp_path / "traces").as_posix(), path.read_bytes()) == (NAME, b"abc")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize(
    "name", ["../rank-3.json.gz", f"{NAME}/x", "attempt-0-step-1/../../token", "rank-3.json.gz", ""]
)
def test_name_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceRefused):
        asyncio.run(TraceStore(tmp_path).store(name, blocks(b"x")))
    assert [*tmp_path.iterdir()] == []


def test_trace_above_a_limit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = TraceStore(tmp_path, max_bytes=4, max_total_bytes=6)
    with pytest.raises(TraceRefused):
        asyncio.run(store.store(NAME, blocks(b"12345")))
    asyncio.run(store.store(NAME, blocks(b"1234")))
    with pytest.raises(TraceRefused):
        asyncio.run(store.store(trace_name(20, 4, attempt=0), blocks(b"123")))
    assert [path.name for path in tmp_path.glob("*/*")] == ["rank-3.json.gz"]
