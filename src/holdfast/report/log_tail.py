"""Tails one rank's log file block by block, and decides when to show an incomplete line.

rank_logs.py finds the files, line_splitter.py splits bytes into lines.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from holdfast.host.files import UnexpectedFile, open_regular, regular_opener
from holdfast.host.sparse_files import next_data
from holdfast.report.line_splitter import LineSplitter

BLOCK_BYTES = 1 << 20
PREVIEW_BYTES = 1 << 16
"""Bytes read from a file's end for a preview."""

PROGRESS_INTERVAL_S = 2.0
"""Minimum time between two updates of an incomplete line: a progress bar writes ten per second."""
PARTIAL_LINE_DELAY_S = 0.5
"""An incomplete line is shown after this time without new text; a line that overwrites itself, sooner."""


class TailChunk(Struct, frozen=True, kw_only=True):
    """The result of one read."""

    lines: list[str]
    partial: bool = False
    """Whether the line is incomplete."""
    dropped_bytes: int = 0
    """Unread bytes dropped by `logs.max_bytes` just before these lines."""


class LogTail:
    """One growing file; `last_lines` starts that many lines before its end. Times are monotonic seconds."""

    def __init__(self, path: Path, *, colours: bool = False, last_lines: int | None = None) -> None:
        self._path = path
        self._last_lines = last_lines
        self.offset = 0
        """Offset of the next read."""
        self._splitter = LineSplitter(colours=colours)
        self._changed_at = self._shown_at = float("-inf")

    @property
    def size(self) -> int:
        """Current size of the file in bytes."""
        try:
            return os.stat(self._path).st_size
        except OSError:  # no file, or a dangling link
            return 0

    def read(self, now: float) -> TailChunk | None:
        """Read the next block; None if there is nothing new."""
        if self.size == self.offset:
            self._last_lines = None  # everything written to an empty file is new and shown
            return None
        try:
            file = regular_opener(str(self._path), os.O_RDONLY)
        except (FileNotFoundError, UnexpectedFile):
            return None
        try:
            return self._read(file, now)
        finally:
            os.close(file)

    def poll_partial(self, now: float) -> TailChunk | None:
        """The incomplete line, if it is time to show it (again)."""
        line = self._splitter.line
        if not line.updated or now - self._shown_at < PROGRESS_INTERVAL_S:
            return None
        if not line.overwrites and now - self._changed_at < PARTIAL_LINE_DELAY_S:
            return None
        self._shown_at = now
        line.updated = False
        return TailChunk(lines=[self._splitter.preview()], partial=True)

    def flush(self) -> TailChunk | None:
        """The final incomplete line, once the file has no writer."""
        lines = self._splitter.flush()
        return TailChunk(lines=lines) if lines else None

    def _read(self, file: int, now: float) -> TailChunk | None:
        if self._last_lines is not None:
            self.offset, self._last_lines = _start_of_last_lines(file, self._last_lines), None
        if os.fstat(file).st_size < self.offset:
            self.offset = 0  # the rank truncated its own output
        begin = self.offset
        block = os.pread(file, BLOCK_BYTES, begin)
        # Checked after reading: holes only grow from the file's start, so data now was data during the read.
        while (data := next_data(file, begin)) != begin:
            if self._splitter.line.started:
                return self.flush()  # the rest of a line whose end was dropped; the next read reports the dropped bytes
            begin = data
            block = os.pread(file, BLOCK_BYTES, begin)
        dropped = begin - self.offset
        self.offset = begin + len(block)
        if not block and not dropped:
            return None
        self._changed_at = now
        return TailChunk(lines=self._splitter.feed(block), dropped_bytes=dropped)


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a file, including an incomplete one; reads at most the last `PREVIEW_BYTES`."""
    try:
        with open_regular(path) as file:
            start = max(0, file.seek(0, os.SEEK_END) - PREVIEW_BYTES)
            file.seek(start)
            text = file.read(PREVIEW_BYTES)
    except (FileNotFoundError, UnexpectedFile):
        return []
    _, newline, whole = text.partition(b"\n")
    cutter = LineSplitter(colours=False)
    return [*cutter.feed(whole if start and newline else text), *cutter.flush()][-count:]


def _start_of_last_lines(file: int, count: int) -> int:
    """Offset of the last `count` lines; 0 if there are no more."""
    end = os.fstat(file).st_size
    if count == 0:
        return end
    if os.pread(file, 1, end - 1) != b"\n":
        count -= 1
    begin = next_data(file, 0)
    while end > begin:
        start = max(begin, end - BLOCK_BYTES)
        block = os.pread(file, end - start, start)
        ends = block.count(b"\n")
        if ends > count:
            at = len(block)
            for _ in range(count + 1):
                at = block.rindex(b"\n", 0, at)
            return start + at + 1
        count -= ends
        end = start
    return 0
