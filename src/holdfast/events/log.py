"""The event log on disk, and its reader: one JSON object per line, append-only; log_writer.py appends to it.

A line is complete when it ends in a newline. A writer that died in the middle of a line leaves a torn tail: the next
writer cuts it off (its sender resends it), and readers wait for the newline. Every line carries its own CRC-32; readers
skip and count corrupt lines.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.events import AnyEvent, RunCreated
from holdfast.events.controller_events import FORMAT, OLDEST_FORMAT
from holdfast.events.encoding import encode
from holdfast.host.files import UnexpectedFile, open_regular

BLOCK_BYTES = 65536
"""Bytes per read when a log is read from its end."""

MAX_LINE_BYTES = 64 << 20
"""Longer than any line: a batched event of thousands of nodes takes some megabytes."""

_decoder = msgspec.json.Decoder(AnyEvent)


_CRC = b',"crc":"'
"""Last field of every line, with eight hexadecimal digits: the CRC-32 of everything before it."""


class CorruptLine(Exception):
    """A line does not match its checksum."""


class CorruptSpan(Struct, frozen=True, kw_only=True):
    """Consecutive corrupt lines of a log; numbers count from 1."""

    first_line: int
    last_line: int
    offset: int
    """Offset of the first byte in the file."""
    size_bytes: int

    @property
    def line_count(self) -> int:
        """Number of lines, a lower bound for lost events: a lost newline joins two lines into one."""
        return self.last_line - self.first_line + 1


def encode_line(event: AnyEvent) -> bytes:
    """An event as its line in the log."""
    body = encode(event)[:-1]
    return b'%s%s%08x"}\n' % (body, _CRC, zlib.crc32(body))


def decode_line(line: bytes) -> AnyEvent | None:
    """Decode one line; None for an event type that this version does not know. Raises `CorruptLine`."""
    if not is_intact_line(line):
        raise CorruptLine
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None


def is_intact_line(line: bytes) -> bool:
    """Whether a line matches its checksum; decodes nothing."""
    body, mark, given = line.rpartition(_CRC)
    return bool(mark) and given.rstrip() == b'%08x"}' % zlib.crc32(body)


def whole_lines_bytes(path: Path) -> int:
    """Length of the file up to and including its last newline."""
    with open_regular(path) as file:
        end = file.seek(0, os.SEEK_END)
        size = end
        while end > 0:
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            if size - start > MAX_LINE_BYTES:
                raise _too_long(path)
            end = start
    return 0


def lines_of(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """A log's lines, the last perhaps without newline; raises `UnexpectedFile` for one over `MAX_LINE_BYTES`."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise _too_long(path)
        yield line


def _too_long(path: Path) -> UnexpectedFile:
    return UnexpectedFile(errno.EFBIG, f"it has a line of more than {MAX_LINE_BYTES:,} bytes", str(path))


TRUNCATION_GRACE_S = 5.0
"""Seconds after which a reader of a truncated log reads it from its start.

The controller checks the log every second; after this time it has not restored the missing lines.
"""


class EventReader:
    """Reads a log that may still grow: each `read()` yields the events since the last call.

    If another log replaces it, such as a restored replica, reading resumes where the new log begins with what was read;
    otherwise it restarts from the beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        """Inode of the file read last."""
        self._offset = 0
        self._crc = 0
        """CRC-32 of what was read."""
        self._line = 0
        self._truncated_at: float | None = None
        """Monotonic seconds since when the file is shorter than what was read."""
        self.corrupt_spans: list[CorruptSpan] = []
        """Corrupt lines skipped so far, adjacent lines merged."""

    @property
    def has_read(self) -> bool:
        """Whether any line has been read."""
        return self._line > 0

    @property
    def corrupt_line_count(self) -> int:
        return sum(damage.line_count for damage in self.corrupt_spans)

    def read(self) -> Iterator[AnyEvent]:
        """The new events, without corrupt lines."""
        return (entry for entry in self.entries() if not isinstance(entry, CorruptSpan))

    def skip(self) -> None:
        """Count the events so far as read; decodes none."""
        with contextlib.suppress(FileNotFoundError), open_regular(self._path) as file:
            self._seek_to_unread(file)
            for line in lines_of(file, self._path):
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._crc = zlib.crc32(line, self._crc)
                self._line += 1

    def entries(self) -> Iterator[AnyEvent | CorruptSpan]:
        """The new events, and each corrupt line at its position."""
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return
        with file:
            self._seek_to_unread(file)
            for line in lines_of(file, self._path):
                if not line.endswith(b"\n"):
                    return
                first, offset = self._offset == 0, self._offset
                self._offset += len(line)
                self._crc = zlib.crc32(line, self._crc)
                self._line += 1
                try:
                    event = decode_line(line)
                except CorruptLine:
                    yield self._record_corrupt(offset, len(line))
                    continue
                if event is None:  # of a type that this version does not know
                    continue
                if first and isinstance(event, RunCreated) and not OLDEST_FORMAT <= event.format <= FORMAT:
                    raise UnsupportedFormat(event.format)
                yield event

    def _seek_to_unread(self, file: BinaryIO) -> None:
        """Seek to the first unread byte."""
        inode = os.fstat(file.fileno()).st_ino
        if self._inode not in (0, inode) and zlib.crc32(file.read(self._offset)) != self._crc:
            self._offset = self._crc = self._line = 0
        self._inode = inode
        if os.fstat(file.fileno()).st_size >= self._offset:
            self._truncated_at = None
        elif self._truncated_at is None:
            self._truncated_at = time.monotonic()
        elif time.monotonic() - self._truncated_at > TRUNCATION_GRACE_S:
            self._offset = self._crc = self._line = 0
            self._truncated_at = None
        file.seek(self._offset)

    def _record_corrupt(self, offset: int, size_bytes: int) -> CorruptSpan:
        one = CorruptSpan(first_line=self._line, last_line=self._line, offset=offset, size_bytes=size_bytes)
        last = self.corrupt_spans[-1] if self.corrupt_spans else None
        if last is not None and last.last_line == one.first_line - 1:
            size_bytes += last.size_bytes
            self.corrupt_spans[-1] = replace(last, last_line=one.last_line, size_bytes=size_bytes)
        else:
            self.corrupt_spans.append(one)
        return one


def is_intact(path: Path) -> bool:
    """Whether every complete line of a log matches its checksum; decodes no event."""
    with open_regular(path) as file:
        return all(is_intact_line(line) for line in lines_of(file, path) if line.endswith(b"\n"))


class UnsupportedFormat(Exception):
    """The log was written by another version of holdfast, in a format this one cannot read."""

    def __init__(self, found: int) -> None:
        read = " and ".join(map(str, sorted({OLDEST_FORMAT, FORMAT})))
        super().__init__(f"event log has format {found}; this holdfast reads format {read}")


def last_event(path: Path) -> AnyEvent | None:
    """The last complete event of a log, read from its end; None if it is corrupt or of an unknown type."""
    try:
        end = whole_lines_bytes(path)
        with open_regular(path) as file:
            start = end
            block = b""
            while start > 0 and b"\n" not in block[:-1] and len(block) <= MAX_LINE_BYTES:
                start = max(0, start - BLOCK_BYTES)
                file.seek(start)
                block = file.read(end - start)
    except FileNotFoundError:
        return None
    try:
        return decode_line(block[:-1].rpartition(b"\n")[2])
    except CorruptLine:
        return None


def line_of(path: Path, event: AnyEvent) -> int:
    """The number of the line that holds an event, from 1; 0 if no line does."""
    sought = encode_line(event)
    with open_regular(path) as file:
        return next((number for number, line in enumerate(file, 1) if line == sought), 0)


def read_events(path: Path) -> list[AnyEvent]:
    """Every complete event of a log, in order."""
    return list(EventReader(path).read())
