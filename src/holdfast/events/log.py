"""Owns the event log on disk: one JSON object a line, appended, never changed.

A line is complete when it ends in a newline. A writer that died in the middle of a line leaves a torn tail; the next
writer cuts it off (its sender will send it again), and readers wait for the newline.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from holdfast.events import AnyEvent, RunCreated
from holdfast.events.run import FORMAT

BLOCK_BYTES = 65536
"""How much is read at a time when a log is read from its end."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)


def decode(line: bytes) -> AnyEvent | None:
    """Read one line; None for a kind of event this version does not know, or a line that is damaged."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class EventWriter:
    """Appends events to a run's log; only the run's controller holds one.

    A batch goes out in one write, so a killed controller loses no line it has handed over. `sync` additionally waits
    for the disk, for the few events that must outlive the machine.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, _whole_lines_bytes(path))
        os.lseek(self._fd, 0, os.SEEK_END)

    def append(self, events: Iterable[AnyEvent], *, sync: bool = False) -> None:
        data = memoryview(b"".join(_encoder.encode(event) + b"\n" for event in events))
        end = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            # A full disk takes a part: without it the next event would be glued to half a line, and lost with it.
            os.ftruncate(self._fd, end)
            os.lseek(self._fd, end, os.SEEK_SET)
            raise
        if sync:
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _whole_lines_bytes(path: Path) -> int:
    """Length of the file up to and including its last newline."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


class EventReader:
    """Reads a log that may still be growing: each `read()` yields what has come since the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.damaged_lines = 0
        """Lines skipped because they are damaged or of a kind this version does not know."""

    def read(self) -> Iterator[AnyEvent]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                first = self._offset == 0
                self._offset += len(line)
                event = decode(line)
                if event is None:
                    self.damaged_lines += 1
                    continue
                if first and isinstance(event, RunCreated) and event.format > FORMAT:
                    raise UnsupportedFormat(event.format)
                yield event


class UnsupportedFormat(Exception):
    """The log was written by a newer holdfast in a format this one cannot read."""

    def __init__(self, found: int) -> None:
        super().__init__(f"event log has format {found}; this holdfast reads up to {FORMAT}")
        self.found = found


def last_event(path: Path) -> AnyEvent | None:
    """The last complete event of a log, read from its end; None when there is none that this version knows."""
    try:
        end = _whole_lines_bytes(path)
        with path.open("rb") as file:
            start = end
            block = b""
            while start > 0 and b"\n" not in block[:-1]:
                start = max(0, start - BLOCK_BYTES)
                file.seek(start)
                block = file.read(end - start)
    except FileNotFoundError:
        return None
    return decode(block[:-1].rpartition(b"\n")[2])


def read_events(path: Path) -> list[AnyEvent]:
    """Every complete event of a log, in order."""
    return list(EventReader(path).read())
