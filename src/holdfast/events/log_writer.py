"""Appends to the event log, and undoes what other processes do to it; log.py defines its lines."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from holdfast.events import AnyEvent
from holdfast.events.compressed_copy import CompressedCopy
from holdfast.events.disk_reservation import DiskReservation
from holdfast.events.log import encode_line, is_intact_line, lines_of, whole_lines_bytes
from holdfast.host.files import UnexpectedFile, open_regular, regular_opener

RESERVATION_BYTES = 4 << 20
"""Disk space reserved for the log to grow into: some hours of steps once the disk is full."""

SHUTDOWN_RESERVATION_BYTES = 256 << 10
"""The part of the reservation that only a run that is ending may use: to be cancelled, judged and finished."""

CHUNK_BYTES = 1 << 20
"""Bytes per read when the log is loaded into memory."""


class AnotherWriter(Exception):
    """Another controller has written events to this log, so it owns the run."""


class Repair(Struct, frozen=True, kw_only=True):
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
        self._end = whole_lines_bytes(path)
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
        found, what = 0, "it was removed, and is written again"
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
            if any(is_intact_line(line) and line.rstrip(b"\n") not in ours for line in lines_of(file, self.path)):
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
