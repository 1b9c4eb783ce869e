"""One readable view of what all ranks wrote: whose, in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.events import RecoveryDecided
from holdfast.findings import Finding
from holdfast.report.log_tail import BLOCK_BYTES, PREVIEW_BYTES
from holdfast.report.rank_logs import (
    LIST_INTERVAL_S,
    PREVIEW_LIST_INTERVAL_S,
    LogPreview,
    MergedLog,
    RankChunk,
    RankLog,
    find_rank_logs,
    first_failures,
)
from holdfast.run_dir import RunDir

FAILED = RecoveryDecided(
    at=1, replica=0, attempt=0, action="stop", failed_at=1, finding=Finding(code="x", what="y"), first_failed_rank=2
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "demo-abc234")


class Clock:
    """Each look comes late enough to see new files."""

    now = 0.0

    def __call__(self) -> float:
        self.now += LIST_INTERVAL_S
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def write(run: RunDir, content: bytes, *, attempt: int = 0, rank: int = 0) -> None:
    path = run.rank_log(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(content)


def lines(said: list[RankChunk]) -> list[str]:
    return [line for each in said for line in each.chunk.lines]


def test_files_are_found_by_attempt_replica_and_rank(run: RunDir) -> None:
    write(run, b"", attempt=1, rank=10)
    write(run, b"", attempt=0, rank=2)
    other = run.rank_log(0, 3, replica=1, replicas=2)
    other.parent.mkdir(parents=True)
    other.touch()
    (run.path / "logs" / "attempt-0" / "notes.txt").touch()
    assert list(find_rank_logs(run)) == [
        RankLog(attempt=0, replica=0, rank=2),
        RankLog(attempt=0, replica=1, rank=3),
        RankLog(attempt=1, replica=0, rank=10),
    ]
    assert list(find_rank_logs(run, from_attempt=1)) == [RankLog(attempt=1, replica=0, rank=10)]


def test_rank_that_failed_first_is_first_and_marked(run: RunDir) -> None:
    for rank in range(3):
        write(run, f"line of {rank}\n".encode(), rank=rank)
    said = list(MergedLog(run).drain(0, first_failures([FAILED])))
    assert [(each.source.rank, each.failed_first) for each in said] == [(2, True), (0, False), (1, False)]


def test_growing_files_give_each_line_once_when_it_is_whole(run: RunDir, clock: Clock) -> None:
    merged = MergedLog(run)
    assert list(merged.poll(clock())) == []
    write(run, b"one\ntw")
    assert lines(list(merged.poll(clock()))) == ["one"]
    write(run, b"o\n")
    write(run, b"other\n", rank=1)
    assert lines(list(merged.poll(clock()))) == ["two", "other"]
    write(run, b"no end")
    assert lines(list(merged.drain(clock()))) == ["no end"]
    assert list(merged.drain(clock())) == []


def test_later_attempt_ends_the_lines_of_the_earlier_one(run: RunDir, clock: Clock) -> None:
    merged = MergedLog(run)
    write(run, b"one\ncut sho")
    list(merged.poll(clock()))
    write(run, b"again\n", attempt=1)
    said = [*merged.poll(clock()), *merged.poll(clock())]
    assert sorted((each.source.attempt, *each.chunk.lines) for each in said) == [(0, "cut sho"), (1, "again")]
    write(run, b"nobody writes here\n")
    assert list(merged.poll(clock())) == []


def test_only_the_selected_logs_are_read(run: RunDir) -> None:
    for attempt in range(3):
        for rank in range(3):
            write(run, f"{attempt}.{rank}\n".encode(), attempt=attempt, rank=rank)
    assert lines(list(MergedLog(run, ranks={(0, 1)}).drain(0))) == ["0.1", "1.1", "2.1"]
    assert lines(list(MergedLog(run, from_attempt=1, to_attempt=1).drain(0))) == ["1.0", "1.1", "1.2"]


def test_last_lines_are_those_of_each_rank_and_what_comes_is_whole(run: RunDir, clock: Clock) -> None:
    for rank in range(2):
        write(run, b"".join(b"%d.%d\n" % (rank, number) for number in range(9)), rank=rank)
    merged = MergedLog(run, last_lines=2)
    assert lines(list(merged.poll(clock()))) == ["0.7", "0.8", "1.7", "1.8"]
    write(run, b"a\nb\nc\n", rank=0)
    write(run, b"a\nb\nc\n", attempt=1)
    assert lines(list(merged.poll(clock()))) == ["a", "b", "c"] * 2


def test_rank_that_writes_without_pause_keeps_no_other_waiting(run: RunDir, clock: Clock) -> None:
    write(run, b"flood\n" * (BLOCK_BYTES // 2), rank=0)
    write(run, b"one line\n", rank=1)
    first_look = list(MergedLog(run).poll(clock()))
    assert [each.source.rank for each in first_look] == [0, 1]
    assert sum(len(line) + 1 for line in first_look[0].chunk.lines) <= BLOCK_BYTES


def test_rank_that_writes_faster_than_it_is_read_lets_the_reading_end(run: RunDir) -> None:
    write(run, b"line\n" * BLOCK_BYTES)
    read = 0
    for said in MergedLog(run).drain(0):
        read += len(said.chunk.lines)
        write(run, b"line\n" * BLOCK_BYTES)
    assert BLOCK_BYTES <= read <= 2 * BLOCK_BYTES


def test_glimpse_is_of_the_first_rank_that_has_written_in_the_latest_attempt(run: RunDir) -> None:
    glimpse = LogPreview(run, 2)
    assert glimpse.poll(0) is None
    write(run, b"x\n", rank=0)
    write(run, b"", attempt=1, rank=0)
    write(run, b"x" * PREVIEW_BYTES + b"\none\ntwo\n10%\r20%", attempt=1, rank=1)
    assert glimpse.poll(PREVIEW_LIST_INTERVAL_S) == (RankLog(attempt=1, replica=0, rank=1), ["two", "20%"])
    write(run, b"\r30%\n", attempt=1, rank=1)
    assert glimpse.poll(PREVIEW_LIST_INTERVAL_S) == (RankLog(attempt=1, replica=0, rank=1), ["two", "30%"])
    run.rank_log(1, 1).unlink()
    assert glimpse.poll(PREVIEW_LIST_INTERVAL_S) == (RankLog(attempt=1, replica=0, rank=1), [])
