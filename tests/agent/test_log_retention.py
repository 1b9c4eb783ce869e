"""How much of what ranks wrote is kept: the newest, over all attempts, while they write."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.agent.log_retention import HOLE_ALIGN_BYTES, LogRetention
from holdfast.findings import Finding
from holdfast.host import sparse_files

DEADLINE_S = 200.0


def log_of(tmp_path: Path, attempt: int = 0) -> Path:
    path = tmp_path / f"attempt-{attempt}" / "rank-0.log"
    path.parent.mkdir(exist_ok=True)
    return path


def kept(path: Path) -> int:
    """Bytes from the first that was not dropped to the end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            return size - os.lseek(file.fileno(), 0, os.SEEK_DATA)
        except OSError:  # it is all hole
            return 0


def settle(path: Path, max_bytes: int) -> list[Finding]:
    found: list[Finding] = []
    looked_after = LogRetention(found.append)
    looked_after.add("rank 0", path, max_bytes)
    looked_after.remove(path)
    return found


def test_log_within_its_limit_stays_as_it_is(tmp_path: Path) -> None:
    path = log_of(tmp_path)
    path.write_bytes(b"x" * 3 * HOLE_ALIGN_BYTES)
    assert settle(path, 3 * HOLE_ALIGN_BYTES) == []
    assert kept(path) == 3 * HOLE_ALIGN_BYTES


def test_newest_bytes_are_kept_where_they_were_and_the_disk_has_the_rest_back(tmp_path: Path) -> None:
    path = log_of(tmp_path)
    content = os.urandom(10 * HOLE_ALIGN_BYTES + 5)
    path.write_bytes(content)
    (finding,) = settle(path, 2 * HOLE_ALIGN_BYTES)
    assert (finding.code, finding.where) == ("log-truncated", str(path))
    assert kept(path) == 3 * HOLE_ALIGN_BYTES + 5 - HOLE_ALIGN_BYTES
    assert path.read_bytes()[8 * HOLE_ALIGN_BYTES :] == content[8 * HOLE_ALIGN_BYTES :]
    assert path.stat().st_blocks * 512 < 4 * HOLE_ALIGN_BYTES


def test_earlier_attempts_go_first_and_whole_before_anything_later(tmp_path: Path) -> None:
    earlier = [log_of(tmp_path, attempt) for attempt in range(3)]
    for path in earlier:
        path.write_bytes(b"x" * (HOLE_ALIGN_BYTES + 100))
    now = log_of(tmp_path, 10)
    now.write_bytes(b"y" * HOLE_ALIGN_BYTES)
    assert [finding.code for finding in settle(now, 2 * HOLE_ALIGN_BYTES)] == ["log-truncated"]
    assert [kept(path) for path in earlier] == [0, 0, HOLE_ALIGN_BYTES + 100]
    assert kept(now) == HOLE_ALIGN_BYTES
    now.write_bytes(b"y" * 3 * HOLE_ALIGN_BYTES)
    settle(now, 2 * HOLE_ALIGN_BYTES)
    assert [kept(path) for path in [*earlier, now]] == [0, 0, 0, 2 * HOLE_ALIGN_BYTES]


def test_another_ranks_or_replicas_files_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / "attempt-0" / "rank-1.log", tmp_path / "replica-1-attempt-0" / "rank-0.log"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(b"x" * 4 * HOLE_ALIGN_BYTES)
    path = log_of(tmp_path, 1)
    path.write_bytes(b"x" * 4 * HOLE_ALIGN_BYTES)
    settle(path, HOLE_ALIGN_BYTES)
    assert [kept(other) for other in others] == [4 * HOLE_ALIGN_BYTES] * 2


@pytest.mark.slow
def test_rank_that_writes_on_and_on_is_kept_to_its_limit_and_loses_no_line_of_it(tmp_path: Path) -> None:
    path = log_of(tmp_path)
    lines, limit = 400_000, 4 * HOLE_ALIGN_BYTES
    program = f"for n in range({lines}): print('line %08d of a rank that writes as fast as it can' % n)"
    found: list[Finding] = []

    async def watch(rank: subprocess.Popen[bytes]) -> None:
        looked_after = LogRetention(found.append)
        looked_after.add("rank 0", path, limit)
        watching = asyncio.ensure_future(looked_after.run())
        deadline = time.monotonic() + DEADLINE_S
        while rank.poll() is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        looked_after.remove(path)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    with path.open("ab") as output, subprocess.Popen([sys.executable, "-c", program], stdout=output) as rank:
        asyncio.run(watch(rank))
    assert [finding.code for finding in found] == ["log-truncated"]
    assert limit <= kept(path) <= limit + 2 * HOLE_ALIGN_BYTES
    size = path.stat().st_size
    every = [b"line %08d of a rank that writes as fast as it can\n" % n for n in range(lines)]
    assert size == sum(map(len, every))
    assert path.read_bytes()[size - kept(path) :] == b"".join(every)[size - kept(path) :]


def test_file_system_without_holes_is_reported_once_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        """What the C library does on such a file system."""

        @staticmethod
        def fallocate(*_: int) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(sparse_files, "_libc", Refusing)
    found: list[Finding] = []
    looked_after = LogRetention(found.append)
    for attempt in range(2):
        path = log_of(tmp_path, attempt)
        path.write_bytes(b"x" * 9 * HOLE_ALIGN_BYTES)
        looked_after.add("rank 0", path, HOLE_ALIGN_BYTES)
        looked_after.remove(path)
        assert kept(path) == 9 * HOLE_ALIGN_BYTES
    assert [finding.code for finding in found] == ["log-retention-off"]
    assert "not supported" in found[0].evidence[0]
