"""The event log on disk: one JSON object per line, append-only.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast.events import AnyEvent, RunCreated
from holdfast.events.compressed_copy import CompressedCopy
from holdfast.events.controller_events import FORMAT
from holdfast.events.disk_reservation import DiskReservation
from holdfast.events.encoding import encode
from holdfast.host.files import UnexpectedFile, open_regular, regular_opener

RESERVATION_BYTES = 4 << 20
"""Disk space reserved for the log to grow into: some hours of steps once the disk is full."""

SHUTDOWN_RESERVATION_BYTES = 256 << 10
"""The part of the reservation that only a run that is ending may use: to be cancelled, judged and finished."""

CHUNK_BYTES = 1 << 20
"""Bytes per read when the log is loaded into memory."""

BLOCK_BYTES = 65536
"""Bytes per read when a log is read from its end."""

MAX_LINE_BYTES = 64 << 20
"""Longer than any line: a batched event of thousands of nodes takes some megabytes."""

_decoder = msgspec.json.Decoder(AnyEvent)


_CRC = b',"crc":"'
"""Last field of every line, with eight hexadecimal digits: the CRC-32 of everything before it."""


class CorruptLine(Exception):
    """A line does not match its checksum."""


@dataclass(frozen=True, kw_only=True)
class CorruptSpan:
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
    if not _is_intact(line):
        raise CorruptLine
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None


def _is_intact(line: bytes) -> bool:
    body, mark, given = line.rpartition(_CRC)
    return bool(mark) and given.rstrip() == b'%08x"}' % zlib.crc32(body)


class AnotherWriter(Exception):
    """Another controller has written events to this log, so it owns the run."""


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A foreign change to the log that the writer undid."""

    what: str
    """Description of the change."""
    size_bytes: int
    """Size of the foreign data, or of the missing part of the log."""


FOREIGN_WRITE_POLL_S, FOREIGN_WRITE_POLLS = 0.01, 3
"""Seconds between polls of a foreign write, and number of polls.

A half-written line may be another controller's, so it is not cut off before. The controller blocks meanwhile, so the
polls are few.
"""


class EventWriter:
    """Appends events to a run's log; only the run's controller holds one.

    A batch goes out in one write, so a killed controller loses no line it has written. `sync` also waits for the disk,
    for the few events that must survive a machine crash. Where the file system supports it, space is reserved beyond
    the log's end, so that a disk filled by others does not stop the log: `space_error` reports that no more can be
    reserved, and the last of it is only for events of a run that is `ending`.
    """

    def __init__(
        self,
        path: Path,
        *,
        reservation_bytes: int = RESERVATION_BYTES,
        shutdown_reservation_bytes: int = SHUTDOWN_RESERVATION_BYTES,
    ) -> None:
        self.path = path
        self._fd = regular_opener(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        self._end = _whole_lines_bytes(path)
        if os.fstat(self._fd).st_size > self._end:
            os.ftruncate(self._fd, self._end)
        self.repairs: list[Repair] = []
        """Foreign changes undone so far, for the caller to report."""
        self._copy = CompressedCopy()
        with open_regular(path) as file:
            while data := file.read(min(CHUNK_BYTES, self._end - file.tell())):
                self._copy.append(data)
        self._shutdown_reservation_bytes = shutdown_reservation_bytes
        self._reservation_bytes = reservation_bytes
        self._reservation = DiskReservation(self._fd, reservation_bytes)
        self._reservation.extend(self._end)

    @property
    def space_error(self) -> OSError | None:
        """Why the last write could not reserve enough space; None if it could."""
        return self._reservation.error

    def check(self) -> None:
        """Verify that the log is as this writer left it, and restore it if another process changed it.

        Raises `AnotherWriter` if another controller has written to it, which file system locks may fail to prevent, and
        OSError if it cannot be restored.
        """
        if not self._is_at_path():
            self._rewrite_at_path()
        for _ in range(FOREIGN_WRITE_POLLS):
            size = os.fstat(self._fd).st_size
            if size == self._end:
                return
            if size < self._end:
                self._restore()
                self._record_repair("lines were cut off from it, and are put back", self._end - size)
                return
            self._raise_if_another_writer(self._fd, self._end)
            time.sleep(FOREIGN_WRITE_POLL_S)
            if os.fstat(self._fd).st_size == size:
                break
        self._raise_if_another_writer(self._fd, self._end)
        size = os.fstat(self._fd).st_size
        os.ftruncate(self._fd, self._end)
        self._record_repair("what was appended to it is no event, and is cut off", size - self._end)

    def _is_at_path(self) -> bool:
        """Whether this writer's open file is the one at the log's path."""
        try:
            there, ours = os.stat(self.path), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _rewrite_at_path(self) -> None:
        """Write the log again at its path; raises `AnotherWriter` if another controller's log is there."""
        found, what = 0, "it was removed, and is written anew"
        with contextlib.suppress(FileNotFoundError, UnexpectedFile), open_regular(self.path) as file:
            self._raise_if_another_writer(file.fileno(), 0)
            found, what = os.fstat(file.fileno()).st_size, "another file had its name, and is replaced"
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        former, self._fd = self._fd, descriptor
        try:
            self._restore()
            fresh.rename(self.path)
        except OSError:
            self._fd = former
            os.close(descriptor)
            fresh.unlink(missing_ok=True)
            raise
        os.close(former)
        self._reservation = DiskReservation(self._fd, self._reservation_bytes)
        self._record_repair(what, found or self._end)

    def _restore(self) -> None:
        """Write the whole log from memory."""
        at = 0
        for piece in self._copy.chunks():
            data = memoryview(piece)
            while data:
                written = os.pwrite(self._fd, data, at)
                data, at = data[written:], at + written
        os.fdatasync(self._fd)

    def _record_repair(self, what: str, size_bytes: int) -> None:
        self.repairs.append(Repair(what=what, size_bytes=size_bytes))

    def _raise_if_another_writer(self, descriptor: int, start: int) -> None:
        """Raise `AnotherWriter` if the file holds, from `start` on, an event line that this writer never wrote.

        This writer's lines may reappear in order, for example in a copy saved by an editor.
        """
        ours = self._copy.lines()
        with contextlib.suppress(UnexpectedFile), open(descriptor, "rb", closefd=False) as file:
            file.seek(start)
            if any(_is_intact(line) and line.rstrip(b"\n") not in ours for line in _lines(file, self.path)):
                raise AnotherWriter

    def append(self, events: Iterable[AnyEvent], *, sync: bool = False, ending: bool = False) -> None:
        """Write all of these events or none; raises OSError if there is no space, and `AnotherWriter`."""
        self.check()
        whole = b"".join(map(encode_line, events))
        data = memoryview(whole)
        end = self._end + len(data)
        self._reservation.extend(end)
        if (
            self._reservation.error
            and not ending
            and self._reservation.remaining(end) < self._shutdown_reservation_bytes
        ):
            raise self._reservation.error
        try:
            while data:
                data = data[os.pwrite(self._fd, data, end - len(data)) :]
            if sync:
                os.fdatasync(self._fd)
        except OSError:
            # A full disk takes a part: without truncation the next event would follow half a line, and be lost with it.
            os.ftruncate(self._fd, self._end)
            raise
        self._end = end
        self._copy.append(whole)

    def close(self) -> None:
        """Release the reserved space that was not used."""
        with contextlib.suppress(OSError, AnotherWriter):
            self.check()
            os.ftruncate(self._fd, self._end)
        os.close(self._fd)


def _whole_lines_bytes(path: Path) -> int:
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


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
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
        self.unknown_event_count = 0
        """Events skipped because this version does not know their type."""

    @property
    def corrupt_line_count(self) -> int:
        return sum(damage.line_count for damage in self.corrupt_spans)

    def read(self) -> Iterator[AnyEvent]:
        """The new events, without corrupt lines."""
        return (entry for entry in self.entries() if not isinstance(entry, CorruptSpan))

    def entries(self) -> Iterator[AnyEvent | CorruptSpan]:
        """The new events, and each corrupt line at its position."""
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return
        with file:
            self._seek_to_unread(file)
            for line in _lines(file, self._path):
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
                if event is None:
                    self.unknown_event_count += 1
                    continue
                if first and isinstance(event, RunCreated) and event.format != FORMAT:
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
        return all(_is_intact(line) for line in _lines(file, path) if line.endswith(b"\n"))


class UnsupportedFormat(Exception):
    """The log was written by another version of holdfast, in a format this one cannot read."""

    def __init__(self, found: int) -> None:
        super().__init__(f"event log has format {found}; this holdfast reads format {FORMAT}")
        self.found = found


def last_event(path: Path) -> AnyEvent | None:
    """The last complete event of a log, read from its end; None if it is corrupt or of an unknown type."""
    try:
        end = _whole_lines_bytes(path)
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
