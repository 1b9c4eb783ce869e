"""One readable view of what all ranks wrote, whatever they wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.events import RecoveryDecided
from holdfast.findings import Finding
from holdfast.folder import RunFolder
from holdfast.report.logs import LONGEST_PENDING_BYTES, MergedLog, RankLog, first_failures, rank_logs


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "demo-abc234")


def write(run: RunFolder, content: bytes, *, attempt: int = 0, rank: int = 0) -> None:
    path = run.rank_log(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(content)


def texts(run: RunFolder) -> list[str]:
    return [line.text for line in MergedLog(run).read(to_the_end=True)]


def test_files_are_found_by_attempt_replica_and_rank(run: RunFolder) -> None:
    write(run, b"", attempt=1, rank=10)
    write(run, b"", attempt=0, rank=2)
    other = run.rank_log(0, 3, replica=1, replicas=2)
    other.parent.mkdir(parents=True)
    other.touch()
    (run.path / "logs" / "attempt-0" / "notes.txt").touch()
    assert list(rank_logs(run)) == [
        RankLog(attempt=0, replica=0, rank=2),
        RankLog(attempt=0, replica=1, rank=3),
        RankLog(attempt=1, replica=0, rank=10),
    ]


def test_rank_that_failed_first_is_first_and_marked(run: RunFolder) -> None:
    for rank in range(3):
        write(run, f"line of {rank}\n".encode(), rank=rank)
    decided = RecoveryDecided(
        at=1, replica=0, attempt=0, action="stop", failed_at=1, finding=Finding(code="x", what="y"), first_rank=2
    )
    lines = list(MergedLog(run).read(first_failures([decided])))
    assert [(line.source.rank, line.failed_first) for line in lines] == [(2, True), (0, False), (1, False)]


def test_growing_files_give_each_line_once_when_it_is_whole(run: RunFolder) -> None:
    merged = MergedLog(run)
    assert list(merged.read()) == []
    write(run, b"one\ntw")
    assert [line.text for line in merged.read()] == ["one"]
    write(run, b"o\n")
    write(run, b"other\n", attempt=1, rank=1)
    assert [line.text for line in merged.read()] == ["two", "other"]
    write(run, b"no end")
    assert list(merged.read()) == []
    assert [line.text for line in merged.read(to_the_end=True)] == ["no end"]
    assert list(merged.read(to_the_end=True)) == []


def test_only_what_was_asked_for_is_read(run: RunFolder) -> None:
    for attempt in range(3):
        for rank in range(2):
            write(run, f"{attempt}.{rank}\n".encode(), attempt=attempt, rank=rank)
    assert [line.text for line in MergedLog(run, rank=1).read()] == ["0.1", "1.1", "2.1"]
    assert [line.text for line in MergedLog(run, from_attempt=1, to_attempt=1).read()] == ["1.0", "1.1"]


def test_progress_bar_leaves_what_a_terminal_would_show(run: RunFolder) -> None:
    write(run, b"10 %\r50 %\r100 %\ndone\r\n\r\n")
    assert texts(run) == ["100 %", "done", ""]


def test_colours_go_and_whatever_else_could_move_the_cursor_is_spelled_out(run: RunFolder) -> None:
    write(run, b"\x1b[31mred\x1b[0m\tand \x1b[2J\x00\x07 \xff\xfe end\n")
    assert texts(run) == ["red\tand \\x1b[2J\\x00\\x07 �� end"]


def test_line_without_an_end_comes_in_pieces(run: RunFolder) -> None:
    write(run, b"x" * (3 * LONGEST_PENDING_BYTES))
    (only,) = MergedLog(run).read()
    assert only.text.startswith("xxxx")
    assert len(only.text) < 5000
    assert f"{3 * LONGEST_PENDING_BYTES:,} bytes in all" in only.text


@given(content=st.binary(max_size=300))
def test_any_bytes_become_printable_lines(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    run = RunFolder(tmp_path_factory.mktemp("run"))
    write(run, content)
    for text in texts(run):
        assert text.replace("\t", " ").isprintable() or not any(ord(letter) < 32 for letter in text.replace("\t", " "))
        assert "\n" not in text
