"""Owns the reading of one rank's growing file, a block at a time, and when a line is shown whose end has not come.

Refuses to own which files there are (logs.py), how bytes become lines (cutter.py) and where those are shown (cli).
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.host.files import UnexpectedFile, open_regular, regular_opener
from holdfast.report.line_splitter import LineSplitter

BLOCK_BYTES = 1 << 20
PREVIEW_BYTES = 1 << 16
"""What is read of a file's end for a glimpse of it."""

PROGRESS_INTERVAL_S = 2.0
"""Least time between two showings of one line that has not ended: a progress bar writes ten a second."""
PARTIAL_LINE_DELAY_S = 0.5
"""A line that has not ended is shown when nothing was added to it for so long; one that overwrites itself, sooner."""


@dataclass(frozen=True, kw_only=True)
class TailChunk:
    """What one look at a file has brought."""

    lines: list[str]
    partial: bool = False
    """Whether this is how a line looks whose end has not come."""
    dropped_bytes: int = 0
    """What `logs.max_bytes` has dropped, unread, just before these lines."""


class LogTail:
    """One growing file; `last_lines` begins that many lines before its end. Times are monotonic seconds."""

    def __init__(self, path: Path, *, colours: bool = False, last_lines: int | None = None) -> None:
        self._path = path
        self._last_lines = last_lines
        self.offset = 0
        """Where the next look begins."""
        self._splitter = LineSplitter(colours=colours)
        self._changed_at = self._shown_at = float("-inf")

    @property
    def size(self) -> int:
        """Bytes of the file, as it is now."""
        try:
            return os.stat(self._path).st_size
        except OSError:  # there is none, or a link that leads nowhere
            return 0

    def read(self, now: float) -> TailChunk | None:
        """What the next block of the file holds; None when there is nothing new."""
        if self.size == self.offset:
            self._last_lines = None  # what comes into an empty file is new, and shown whole
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
        """How a line looks whose end has not come, where it is time to show it (again)."""
        line = self._splitter.line
        if not line.updated or now - self._shown_at < PROGRESS_INTERVAL_S:
            return None
        if not line.overwrites and now - self._changed_at < PARTIAL_LINE_DELAY_S:
            return None
        self._shown_at = now
        line.updated = False
        return TailChunk(lines=[self._splitter.preview()], partial=True)

    def flush(self) -> TailChunk | None:
        """The line whose end, as nobody writes any more, will never come."""
        lines = self._splitter.flush()
        return TailChunk(lines=lines) if lines else None

    def _read(self, file: int, now: float) -> TailChunk | None:
        if self._last_lines is not None:
            self.offset, self._last_lines = _start_of_last_lines(file, self._last_lines), None
        if os.fstat(file).st_size < self.offset:
            self.offset = 0  # the rank has emptied its own output
        begin = self.offset
        block = os.pread(file, BLOCK_BYTES, begin)
        # Asked after reading: what is no hole now was none while it was read, as holes grow from the file's head only.
        while (data := _data_from(file, begin)) != begin:
            if self._splitter.line.started:
                return self.flush()  # what is left of a line whose end was dropped; the next look says so
            begin = data
            block = os.pread(file, BLOCK_BYTES, begin)
        dropped = begin - self.offset
        self.offset = begin + len(block)
        if not block and not dropped:
            return None
        self._changed_at = now
        return TailChunk(lines=self._splitter.feed(block), dropped_bytes=dropped)


def last_lines(path: Path, count: int) -> list[str]:
    """How the end of a file looks now, an unfinished line included; no more than its last `PREVIEW_BYTES` are read."""
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


def _data_from(file: int, offset: int) -> int:
    """Where data begins at or after an offset: there, or behind the hole that was punched there."""
    size = os.fstat(file).st_size
    try:
        return os.lseek(file, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            return offset  # a file system that does not say; it cannot punch holes either
        return max(offset, size)  # nothing there; what comes meanwhile is behind the size that was asked for before


def _start_of_last_lines(file: int, count: int) -> int:
    """Where the last `count` lines begin; 0 when there are no more than these."""
    end = os.fstat(file).st_size
    if count == 0:
        return end
    if os.pread(file, 1, end - 1) != b"\n":
        count -= 1
    begin = _data_from(file, 0)
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
