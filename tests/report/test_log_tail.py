"""One rank's file, whatever it wrote: lines that are safe to show, in bounded memory, and none lost."""

from __future__ import annotations

import os
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.log_retention import HOLE_ALIGN_BYTES, LogRetention
from holdfast.report.line_splitter import MAX_LINE_BYTES
from holdfast.report.log_tail import BLOCK_BYTES, PARTIAL_LINE_DELAY_S, PROGRESS_INTERVAL_S, LogTail, TailChunk


class Log:
    """A rank's file and a reader of it."""

    def __init__(self, path: Path, content: bytes = b"", **options: object) -> None:
        self.path = path
        self.path.write_bytes(content)
        self.tail = LogTail(path, **options)  # type: ignore[arg-type]

    def write(self, content: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(content)

    def rest(self) -> list[str]:
        """Every line to the end, also one that has none."""
        return shown_by(self.tail)


def shown_by(tail: LogTail) -> list[str]:
    lines: list[str] = []
    while piece := tail.read(0) or tail.flush():
        lines += piece.lines
    return lines


def shown(path: Path, content: bytes, **options: object) -> list[str]:
    return Log(path / "rank-0.log", content, **options).rest()


def test_progress_bar_leaves_what_a_terminal_would_show(tmp_path: Path) -> None:
    assert shown(tmp_path, b"10 %\r50 %\r100 %\ndone\r\n\r\n") == ["100 %", "done", ""]


def test_bar_that_was_wiped_is_shown_as_it_last_was(tmp_path: Path) -> None:
    assert shown(tmp_path, b"\r 99 %|##|\r        \r\n\b\b\b\b\r5/5\n") == [" 99 %|##|", "5/5"]


@pytest.mark.parametrize("reads", [1, 2, 3, 1000])
def test_bars_below_one_another_are_one_line_that_overwrites_itself(tmp_path: Path, reads: int) -> None:
    down, up = b"\n", b"\x1b[A"
    drawn = b"".join(
        b"\repochs %d" % epoch
        + b"".join(down + b"\rbatches %d" % batch + up for batch in range(9))
        + b"".join(2 * down + b"\rfiles %d" % file + 2 * up for file in range(9))
        for epoch in range(3)
    )
    log = Log(tmp_path / "rank-0.log")
    lines: list[str] = []
    for begin in range(0, len(drawn), reads):
        log.write(drawn[begin : begin + reads])
        piece = log.tail.read(0)
        lines += piece.lines if piece else []
    log.write(b"\rdone\nbye\n")
    outer = [line for epoch in range(3) for line in (f"epochs {epoch}", "batches 8")]
    assert [*lines, *log.rest()] == [*outer, "done", "bye"]


@pytest.mark.parametrize(
    ("written", "plain", "coloured"),
    [
        (b"\x1b[31mred\x1b[0m\tand", "red\tand", "\x1b[31mred\x1b[0m\tand\x1b[0m"),
        (b"\x1b[1;38;5;9mhot", "hot", "\x1b[1;38;5;9mhot\x1b[0m"),
        (b"up \x1b[2A\x1b[2J\x1b[?25lhere", "up here", "up here"),
        (b"\x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b]52;c;aGk=\x07", "link", "link"),
        (b"\x1b(B\x1b7\x1b8\x1bcreset", "reset", "reset"),
        (b"\x1b\x1b[0m[31m in \x1b\x1b[2J[2J", "\\x1b[31m in \\x1b[2J", "\\x1b\x1b[0m[31m in \\x1b[2J\x1b[0m"),
        (b"torn \x1b[3", "torn \\x1b[3", "torn \\x1b[3"),
        (
            b"\x00\x07\x9b31m \xff\xfe end",
            "\\x00\\x07\ufffd31m \ufffd\ufffd end",
            "\\x00\\x07\ufffd31m \ufffd\ufffd end",
        ),
    ],
)
def test_colours_may_stay_and_nothing_else_that_moves_a_terminal(
    tmp_path: Path, written: bytes, plain: str, coloured: str
) -> None:
    assert shown(tmp_path, written + b"\n") == [plain]
    assert shown(tmp_path, written + b"\n", colours=True) == [coloured]


def test_character_torn_by_a_read_or_by_the_cut_is_whole(tmp_path: Path) -> None:
    log = Log(tmp_path / "rank-0.log", "Grüße ".encode()[:3])
    assert log.tail.read(0) == TailChunk(lines=[])
    log.write("Grüße ".encode()[3:] + b"\n")
    assert log.rest() == ["Grüße "]
    (cut,) = shown(tmp_path, b"x" + "ü".encode() * MAX_LINE_BYTES)
    assert cut.startswith("xüüü")
    assert "\ufffd" not in cut


@pytest.mark.slow
def test_line_of_ten_megabytes_is_one_line_with_its_size(tmp_path: Path) -> None:
    size = 10_000_000
    for content in (b"x" * size, b"\xff" * size, b"50 %\r" * (size // 5)):
        log = Log(tmp_path / "rank-0.log", b"before\n" + content + b"\nafter\n")
        tracemalloc.start()
        before, line, after = log.rest()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (before, after) == ("before", "after")
        assert len(line) < MAX_LINE_BYTES
        assert line == "50 %" or line.endswith(f"({size:,} bytes in all)")
        assert peak < 20 * BLOCK_BYTES


def test_line_without_an_end_is_shown_after_a_pause_and_again_when_it_is_whole(tmp_path: Path) -> None:
    log = Log(tmp_path / "rank-0.log", b"loading")
    log.tail.read(10)
    assert log.tail.poll_partial(10 + PARTIAL_LINE_DELAY_S / 2) is None
    assert log.tail.poll_partial(10 + PARTIAL_LINE_DELAY_S) == TailChunk(lines=["loading"], partial=True)
    assert log.tail.poll_partial(10 + PROGRESS_INTERVAL_S) is None
    log.write(b" done\n")
    assert log.rest() == ["loading done"]


def test_progress_bar_is_shown_every_few_seconds_as_it_is_then(tmp_path: Path) -> None:
    log = Log(tmp_path / "rank-0.log")
    seen: list[tuple[float, str]] = []
    for tenth in range(100):
        log.write(b"\r%d/100" % tenth)
        now = 50 + tenth / 10
        assert log.tail.read(now) == TailChunk(lines=[])
        if piece := log.tail.poll_partial(now):
            seen += [(now, line) for line in piece.lines]
    assert seen == [
        (50 + n * PROGRESS_INTERVAL_S, f"{round(n * PROGRESS_INTERVAL_S * 10)}/100")
        for n in range(round(10 / PROGRESS_INTERVAL_S))
    ]
    log.write(b"\r100/100\n")
    assert log.rest() == ["100/100"]


@pytest.mark.parametrize("ending", [b"", b"\n"])
@pytest.mark.parametrize("count", [0, 1, 3, 100_000, 10**6])
def test_last_lines_are_found_from_the_end(tmp_path: Path, ending: bytes, count: int) -> None:
    lines = [f"line {number}" for number in range(200_000)]
    found = shown(tmp_path, "\n".join(lines).encode() + ending, last_lines=count)
    assert found == lines[max(0, len(lines) - count) :]


def test_what_comes_into_an_empty_file_is_shown_whole(tmp_path: Path) -> None:
    log = Log(tmp_path / "rank-0.log", last_lines=1)
    assert log.tail.read(0) is None
    log.write(b"one\ntwo\n")
    assert log.rest() == ["one", "two"]


def test_dropped_bytes_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    log = Log(tmp_path / "rank-0.log")
    content = b"".join(b"line %07d\n" % number for number in range(500_000))
    log.write(content)
    retention = LogRetention(lambda finding: None)
    retention.add("rank 0", log.path, 2 * HOLE_ALIGN_BYTES)
    retention.remove(log.path)
    first = log.tail.read(0)
    assert first is not None
    assert first.dropped_bytes == (len(content) - 2 * HOLE_ALIGN_BYTES) // HOLE_ALIGN_BYTES * HOLE_ALIGN_BYTES
    assert "\n".join(first.lines + log.rest()) == content[first.dropped_bytes :].decode().removesuffix("\n")
    assert shown_by(LogTail(log.path, last_lines=2)) == ["line 0499998", "line 0499999"]


def test_overtaken_reader_counts_what_it_missed(tmp_path: Path) -> None:
    log = Log(tmp_path / "rank-0.log", b"first\nbegun")
    assert log.tail.read(0) == TailChunk(lines=["first"])
    log.write(b"x" * 4 * HOLE_ALIGN_BYTES + b"\nlast\n")
    retention = LogRetention(lambda finding: None)
    retention.add("rank 0", log.path, HOLE_ALIGN_BYTES)
    retention.remove(log.path)
    assert log.tail.read(0) == TailChunk(lines=["begun"])
    missed = log.tail.read(0)
    assert missed is not None
    assert missed.dropped_bytes == 3 * HOLE_ALIGN_BYTES - len(b"first\nbegun")
    assert (missed.lines + log.rest())[-1] == "last"


def test_output_that_the_rank_has_emptied_itself_is_read_from_its_new_beginning(tmp_path: Path) -> None:
    log = Log(tmp_path / "rank-0.log", b"a long line of before\n")
    log.tail.read(0)
    os.truncate(log.path, 0)
    log.write(b"new\n")
    assert log.rest() == ["new"]


def test_file_that_is_not_there_yet_is_no_error(tmp_path: Path) -> None:
    assert LogTail(tmp_path / "none.log", last_lines=3).read(0) is None


@given(content=st.binary(max_size=300), colours=st.booleans())
def test_any_bytes_become_lines_that_a_terminal_survives(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, colours: bool
) -> None:
    for text in shown(tmp_path_factory.mktemp("run"), content, colours=colours):
        if not colours:
            assert "\x1b" not in text
        rest = text.replace("\t", " ").replace("\x1b[", "")
        assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in rest)


@given(
    content=st.binary(max_size=200).map(lambda content: content.replace(b"\r", b"")), cuts=st.lists(st.integers(0, 200))
)
def test_however_reads_fall_lines_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    log = Log(folder / "rank-0.log")
    lines: list[str] = []
    edges = sorted({0, *(cut for cut in cuts if cut < len(content)), len(content)})
    for begin, end in pairwise(edges):
        log.write(content[begin:end])
        if piece := log.tail.read(0):
            lines += piece.lines
    assert lines + log.rest() == shown_by(LogTail(log.path))
