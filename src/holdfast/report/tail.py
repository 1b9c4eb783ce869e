"""Owns one rank's growing file, read a block at a time and cut into lines that are safe to show.

Whatever a rank writes, memory stays bounded: of a long line its beginning is kept and the rest counted. Refuses to own
which files there are (logs.py) and where their lines are shown (cli).
"""

from __future__ import annotations

import codecs
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.report.words import LONGEST_LINE, clean

BLOCK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 4 * LONGEST_LINE
"""What is kept of one line: enough for all that is shown of it, whatever its characters."""

PROGRESS_S = 2.0
"""Least time between two showings of one line that has not ended: a progress bar writes ten a second."""
PAUSE_S = 0.5
"""A line that has not ended is shown when nothing was added to it for so long; one that overwrites itself, sooner."""

_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n"
_BLANK = b" \t\b"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one look at a file has brought."""

    lines: list[str]
    unfinished: bool = False
    """Whether this is how a line looks whose end has not come."""
    dropped_bytes: int = 0
    """What `logs.max_bytes` has dropped, unread, just before these lines."""


class Tail:
    """One growing file; `last_lines` begins that many lines before its end. Times are monotonic seconds."""

    def __init__(self, path: Path, *, colours: bool = False, last_lines: int | None = None) -> None:
        self._path = path
        self._colours = colours
        self._last_lines = last_lines
        self._offset = 0
        self._line = _Line()
        self._changed_at = self._shown_at = float("-inf")

    def read(self, now: float) -> Piece | None:
        """What the next block of the file holds; None when there is nothing new."""
        try:
            if os.stat(self._path).st_size == self._offset:
                return None
            file = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return self._read(file, now)
        finally:
            os.close(file)

    def unfinished(self, now: float) -> Piece | None:
        """How a line looks whose end has not come, where it is time to show it (again)."""
        line = self._line
        if not line.fresh or now - self._shown_at < PROGRESS_S:
            return None
        if not line.overwrites and now - self._changed_at < PAUSE_S:
            return None
        self._shown_at = now
        line.fresh = False
        return Piece(lines=[self._shown(*line.state())], unfinished=True)

    def rest(self) -> Piece | None:
        """The line whose end, as nobody writes any more, will never come."""
        if not self._line.begun:
            return None
        last, self._line = self._line, _Line()
        return Piece(lines=[self._shown(*last.state())])

    def _read(self, file: int, now: float) -> Piece | None:
        if self._last_lines is not None:
            self._offset, self._last_lines = _start_of_last_lines(file, self._last_lines), None
        if os.fstat(file).st_size < self._offset:
            self._offset = 0  # the rank has emptied its own output
        begin = self._offset
        block = os.pread(file, BLOCK_BYTES, begin)
        # Asked after reading: what is no hole now was none while it was read, as holes grow from the file's head only.
        while (data := _data_from(file, begin)) != begin:
            if self._line.begun:
                return self.rest()  # what is left of a line whose end was dropped; the next look says so
            begin = data
            block = os.pread(file, BLOCK_BYTES, begin)
        dropped = begin - self._offset
        self._offset = begin + len(block)
        if not block and not dropped:
            return None
        self._changed_at = now
        return Piece(lines=self._cut(block), dropped_bytes=dropped)

    def _cut(self, block: bytes) -> list[str]:
        """The lines that end in this block; what follows the last end waits for its own."""
        first, newline, rest = block.partition(b"\n")
        self._line.add(first)
        if not newline:
            return []
        begun, self._line = self._line, _Line()
        body, newline, torn = rest.rpartition(b"\n")
        self._line.add(torn)
        return [self._shown(*begun.state()), *(self._whole(body) if newline else ())]

    def _whole(self, body: bytes) -> list[str]:
        """Whole lines; those of plain text, as nearly all are, without a look at each."""
        if _is_plain(body):
            lines = body.decode("ascii").split("\n")
            if max(map(len, lines)) <= LONGEST_LINE:
                return lines
        return [self._alone(line) for line in body.split(b"\n")]

    def _alone(self, text: bytes) -> str:
        if b"\r" not in text:
            return self._shown(text[:LONGEST_LINE_BYTES], len(text))
        line = _Line()
        line.add(text)
        return self._shown(*line.state())

    def _shown(self, text: bytes, size: int) -> str:
        """The beginning of a line of `size` bytes, as it may be shown."""
        if size <= LONGEST_LINE and _is_plain(text):
            return text.decode("ascii")
        if size <= len(text):
            return clean(text.decode("utf-8", "replace"), colours=self._colours)
        # A character that the cut has torn is left out.
        begin = codecs.utf_8_decode(text, "replace", False)[0][:LONGEST_LINE]
        return f"{clean(begin, colours=self._colours)}… ({size:,} bytes in all)"


class _Line:
    """A line whose end has not come. As on a terminal, what follows a carriage return overwrites what was before."""

    def __init__(self) -> None:
        self.begun = False
        self.overwrites = False
        self.fresh = False
        """Whether anything was added since it was shown."""
        self._now = self._before = (b"", 0)
        """The beginning of what was written since the last carriage return, with its size; the same before that."""

    def add(self, data: bytes) -> None:
        if not data:
            return
        self.begun = self.fresh = True
        joining, *overwriting = data.split(b"\r")
        text, size = self._now
        self._now = (text + joining[: LONGEST_LINE_BYTES - len(text)], size + len(joining))
        for piece in overwriting:
            self.overwrites = True
            if self._now[0].strip(_BLANK):
                self._before = self._now
            self._now = (piece[:LONGEST_LINE_BYTES], len(piece))

    def state(self) -> tuple[bytes, int]:
        """The beginning of what a terminal would show, and its size in bytes; a bar that has been wiped is shown."""
        return self._now if self._now[0].strip(_BLANK) else self._before if self._before[1] else self._now


def _is_plain(text: bytes) -> bool:
    return not text.translate(None, _PLAIN)


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
