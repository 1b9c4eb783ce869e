"""Owns the event log on disk: one JSON object a line, appended, never changed.

A line is complete when it ends in a newline. A writer that died in the middle of a line leaves a torn tail; the next
writer cuts it off (its sender will send it again), and readers wait for the newline. Every line carries the CRC-32 of
itself, so that one which the disk has changed is passed over and counted, never believed.
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
"""Kept on disk for a log to grow into: some hours of steps, once the disk is full."""

SHUTDOWN_RESERVATION_BYTES = 256 << 10
"""The part of it that is left for a run that is ending: to be cancelled, to judge, to finish."""

CHUNK_BYTES = 1 << 20
"""How much is read at a time when a log is remembered."""

BLOCK_BYTES = 65536
"""How much is read at a time when a log is read from its end."""

MAX_LINE_BYTES = 64 << 20
"""More than any line has: a batch of what thousands of nodes say in one step takes some megabytes."""

_decoder = msgspec.json.Decoder(AnyEvent)


_CRC = b',"crc":"'
"""Comes last in every line, with eight hexadecimal digits: the CRC-32 of all that is before it."""


class CorruptLine(Exception):
    """A line is not what was written."""


@dataclass(frozen=True, kw_only=True)
class CorruptSpan:
    """Lines of a log, one after the other, that are not what was written; numbers count from 1."""

    first_line: int
    last_line: int
    offset: int
    """Of its first byte in the file."""
    size_bytes: int

    @property
    def line_count(self) -> int:
        """How many; a lost newline makes one of two, so at least so many events are lost."""
        return self.last_line - self.first_line + 1


def encode_line(event: AnyEvent) -> bytes:
    """An event as its line."""
    body = encode(event)[:-1]
    return b'%s%s%08x"}\n' % (body, _CRC, zlib.crc32(body))


def decode_line(line: bytes) -> AnyEvent | None:
    """Read one line; None for a kind of event this version does not know. Raises `CorruptLine`."""
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
    """Another controller has written events to this log, so it has the run."""


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A change that no controller made to the log, and that was undone."""

    what: str
    """What was found, in words."""
    size_bytes: int
    """How much was there that is no part of the log, or how much of the log was gone."""


FOREIGN_WRITE_POLL_S, FOREIGN_WRITE_POLLS = 0.01, 3
"""Seconds between two looks at what somebody else is writing, and how many: another controller's line may be half
there, which is no reason to cut it off. The controller does nothing else meanwhile, so they are few."""


class EventWriter:
    """Appends events to a run's log; only the run's controller holds one.

    A batch goes out in one write, so a killed controller loses no line it has handed over. `sync` additionally waits
    for the disk, for the few events that must outlive the machine. Where the file system can, space is kept for the
    log beyond its end, so that a disk filled by others does not end the run's account of itself: `shortage` tells that
    no more can be kept, and the last of it is for the events of a run that is `ending`.
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
        """What was undone so far, for whoever says so."""
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
        """Why no more space could be kept for the log when it was last written; None while there is enough."""
        return self._reservation.error

    def check(self) -> None:
        """See that the log is as this writer left it, and make it so where somebody has changed it.

        Raises `AnotherWriter` where another controller has written to it, which its file system's locks may not prevent,
        and OSError where it cannot be put back.
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
        """Whether the file that this writer has open is the one that others find."""
        try:
            there, ours = os.stat(self.path), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _rewrite_at_path(self) -> None:
        """Write the log anew under its name, in its folder; raises `AnotherWriter` where another controller's is there."""
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
        """Write all of the log from memory."""
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
        """Raise `AnotherWriter` where a file has, from an offset on, a line of a controller that this writer never wrote.

        Lines of its own come back in their order: in a copy that an editor saved, for one.
        """
        ours = self._copy.lines()
        with contextlib.suppress(UnexpectedFile), open(descriptor, "rb", closefd=False) as file:
            file.seek(start)
            if any(_is_intact(line) and line.rstrip(b"\n") not in ours for line in _lines(file, self.path)):
                raise AnotherWriter

    def append(self, events: Iterable[AnyEvent], *, sync: bool = False, ending: bool = False) -> None:
        """Write all of these or none; raises OSError when there is no room for them, and `AnotherWriter`."""
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
            # A full disk takes a part: without it the next event would be glued to half a line, and lost with it.
            os.ftruncate(self._fd, self._end)
            raise
        self._end = end
        self._copy.append(whole)

    def close(self) -> None:
        """Give back what was kept and not needed."""
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
    """A log's lines, the last perhaps without its newline; raises `UnexpectedFile` for one longer than any of ours."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise _too_long(path)
        yield line


def _too_long(path: Path) -> UnexpectedFile:
    return UnexpectedFile(errno.EFBIG, f"it has a line of more than {MAX_LINE_BYTES:,} bytes", str(path))


TRUNCATION_GRACE_S = 5.0
"""Seconds after which a reader of a log from which lines were cut off reads it from its start: its controller, which
looks at it every second, has not put them back."""


class EventReader:
    """Reads a log that may still be growing: each `read()` yields what has come since the last.

    Where another log takes its place, as a copy of one that was lost and had back does, it is read on where it
    begins with what was read, else from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        """Which file it was, by its inode."""
        self._offset = 0
        self._crc = 0
        """Of what was read."""
        self._line = 0
        self._truncated_at: float | None = None
        """Since when there is less than was read (monotonic seconds)."""
        self.corrupt_spans: list[CorruptSpan] = []
        """What was passed over so far, neighbours drawn together."""
        self.unknown_event_count = 0
        """Events passed over because this version does not know their kind."""

    @property
    def corrupt_line_count(self) -> int:
        return sum(damage.line_count for damage in self.corrupt_spans)

    def read(self) -> Iterator[AnyEvent]:
        """The events that have come, damaged lines passed over."""
        return (entry for entry in self.entries() if not isinstance(entry, CorruptSpan))

    def entries(self) -> Iterator[AnyEvent | CorruptSpan]:
        """The events that have come, and each damaged line where it stands."""
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
                if first and isinstance(event, RunCreated) and event.format > FORMAT:
                    raise UnsupportedFormat(event.format)
                yield event

    def _seek_to_unread(self, file: BinaryIO) -> None:
        """Go to what is to be read next."""
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
    """Whether every complete line of a log is what was written; reads no event."""
    with open_regular(path) as file:
        return all(_is_intact(line) for line in _lines(file, path) if line.endswith(b"\n"))


class UnsupportedFormat(Exception):
    """The log was written by a newer holdfast in a format this one cannot read."""

    def __init__(self, found: int) -> None:
        super().__init__(f"event log has format {found}; this holdfast reads up to {FORMAT}")
        self.found = found


def last_event(path: Path) -> AnyEvent | None:
    """The last complete event of a log, read from its end; None when it is damaged, or of no kind that is known."""
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
    """The number of the line that holds an event, from 1; 0 where none does."""
    sought = encode_line(event)
    with open_regular(path) as file:
        return next((number for number, line in enumerate(file, 1) if line == sought), 0)


def read_events(path: Path) -> list[AnyEvent]:
    """Every complete event of a log, in order."""
    return list(EventReader(path).read())
