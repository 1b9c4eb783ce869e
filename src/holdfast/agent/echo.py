"""Copies what ranks write to the agent's standard output, where `kubectl logs` and log pipelines read it.

A rank writes to its file and never waits for this: the file is read behind it. A reader that is too slow misses some
of it, which is said in its place.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

from holdfast.events.echoed import Speaker
from holdfast.host.files import open_plain

PIECE_BYTES = select.PIPE_BUF
"""Largest write. A pipe that has any room takes it whole and at once, so it waits for no reader and mixes with no other
line."""
READ_BYTES = 64 << 10
"""Most that is read of one rank at a time."""
BEHIND_BYTES = 4 << 20
"""Most of a rank's output that may wait to be copied: the rest of what is older is left out."""
LOOK_S = 0.2
BUSY_LOOK_S = 0.02
"""Seconds between looks while there is more: 3 MB/s at most, of each rank."""


class Echo:
    """Follows the files of a node's ranks."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._files: dict[Path, _File] = {}
        self._waiting: deque[bytes] = deque()
        self._room = select.poll()
        self._room.register(descriptor, select.POLLOUT)

    def follow(self, path: Path, speaker: Speaker, *, several: bool) -> None:
        """Copy what a rank writes to a file from now on."""
        self._files[path] = _File(path, speaker.label(several=several).encode())

    def release(self, path: Path) -> None:
        """Nobody writes to this file any more: copy the rest of it."""
        if (file := self._files.get(path)) is not None:
            file.over = True

    async def run(self) -> None:
        """Copy for ever."""
        while True:  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(BUSY_LOOK_S if self._copy() else LOOK_S)

    async def finish(self, within_s: float) -> None:
        """Copy what is left, as far as it is read in time."""
        deadline = time.monotonic() + within_s
        for file in self._files.values():
            file.over = True
        while self._copy() and time.monotonic() < deadline:  # noqa: ASYNC110 - nor does a pipe
            await asyncio.sleep(BUSY_LOOK_S)

    def _copy(self) -> bool:
        """Copy what there is room for; whether there is more."""
        self._write()
        more = False
        for path, file in list(self._files.items()):
            if self._waiting:
                more = True  # the reader is slow: whatever it misses is left in the files
                break
            pieces, left = file.read()
            self._waiting.extend(pieces)
            more = more or left
            self._write()
            if file.over and not left:
                file.close()
                del self._files[path]
        return more or bool(self._waiting)

    def _write(self) -> None:
        while self._waiting and self._room.poll(0):
            batch = bytearray(self._waiting.popleft())
            while self._waiting and len(batch) + len(self._waiting[0]) <= PIECE_BYTES:
                batch += self._waiting.popleft()
            try:
                os.write(self._descriptor, batch)
            except OSError:  # nobody reads it any more, or its disk is full
                self._waiting.clear()


class _File:
    """What one rank has written in one attempt, and how much of it was copied."""

    def __init__(self, path: Path, label: bytes) -> None:
        self._path = path
        self._label = label
        self._file: BinaryIO | None = None
        self._at = 0
        self._unfinished = b""
        """The beginning of a line."""
        self.over = False

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def read(self) -> tuple[list[bytes], bool]:
        """The next lines to be written, and whether there is more to be read."""
        try:
            descriptor, size = self._opened()
            pieces = self._skipped(size)
            self._at = _data(descriptor, self._at, size)
            data = os.pread(descriptor, READ_BYTES, self._at)
        except OSError as error:
            if error.errno == errno.ESTALE:  # another machine removed it
                self.close()
            return [], False
        self._at += len(data)
        more = self._at < size
        *lines, rest = (self._unfinished + data).split(b"\n")
        for line in lines:
            pieces += self._pieces(line, whole=True)
        if rest and ((self.over and not more) or len(rest) > PIECE_BYTES):
            pieces += self._pieces(rest, whole=False)
            rest = b""
        self._unfinished = rest
        return pieces, more

    def _opened(self) -> tuple[int, int]:
        """The file's descriptor and size. It stays open until it was removed: each open is a request to a volume."""
        file = self._file
        if file is None or os.fstat(file.fileno()).st_nlink == 0:
            file = open_plain(self._path)
            self.close()
            self._file, self._at, self._unfinished = file, 0, b""
        return file.fileno(), os.fstat(file.fileno()).st_size

    def _skipped(self, size: int) -> list[bytes]:
        """Leave out what the reader will never catch up with."""
        if size < self._at:  # the rank has emptied it
            self._at, self._unfinished = 0, b""
        behind = size - self._at
        if behind <= BEHIND_BYTES:
            return []
        left_out, self._unfinished = behind - BEHIND_BYTES // 2, b""
        self._at += left_out
        why = f"{left_out:,} bytes are left out here, because standard output is read too slowly"
        return self._pieces(f"holdfast: {why}; all of it is in {self._path}".encode(), whole=True)

    def _pieces(self, line: bytes, *, whole: bool) -> list[bytes]:
        room = PIECE_BYTES - len(self._label) - len("+ \n")
        parts = [line[start : start + room] for start in range(0, len(line), room)] or [b""]
        ends = [*(b"+" for _ in parts[1:]), b"" if whole else b"+"]
        return [self._label + end + b" " + part + b"\n" for part, end in zip(parts, ends, strict=True)]


def _data(descriptor: int, at: int, size: int) -> int:
    """Where there is something to read from here on: what was given back to the disk reads as zeros (retention.py)."""
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError:  # from here on there is nothing
        return size
