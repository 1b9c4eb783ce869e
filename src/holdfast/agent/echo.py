"""Copies the ranks' output to the agent's standard output, where `kubectl logs` and log pipelines read it.

A rank writes to its file and never waits for the echo, which reads the file afterwards. When the reader of standard
output is too slow, the echo skips output and prints how much.
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

from holdfast.host.files import open_regular
from holdfast.host.sparse_files import next_data
from holdfast.protocol.rank_output import OutputSource

MAX_WRITE_BYTES = select.PIPE_BUF
"""Largest write. A pipe with space takes it whole, so the agent does not block and lines do not interleave."""
READ_BYTES = 64 << 10
"""Most bytes read from one rank at a time."""
MAX_BACKLOG_BYTES = 4 << 20
"""Most bytes of a rank's output that may wait to be copied; older output is skipped."""
POLL_S = 0.2
BUSY_POLL_S = 0.02
"""Seconds between polls while there is more to copy: at most 3 MB/s per rank."""


class Echo:
    """Follows the output files of a node's ranks."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._files: dict[Path, _EchoedFile] = {}
        self._pending: deque[bytes] = deque()
        self._writable = select.poll()
        self._writable.register(descriptor, select.POLLOUT)

    def follow(self, path: Path, speaker: OutputSource, *, several: bool) -> None:
        """Copy a rank's output from this file from now on."""
        self._files[path] = _EchoedFile(path, speaker.label(has_replicas=several).encode())

    def drain(self, path: Path) -> None:
        """The file's writers have ended: copy the rest of it."""
        if (file := self._files.get(path)) is not None:
            file.ended = True

    async def run(self) -> None:
        """Copy forever."""
        while True:  # noqa: ASYNC110 - a file sends no events
            await asyncio.sleep(BUSY_POLL_S if self._copy() else POLL_S)

    async def finish(self, within_s: float) -> None:
        """Copy the rest, as far as it can be read within the timeout."""
        deadline = time.monotonic() + within_s
        for file in self._files.values():
            file.ended = True
        while self._copy() and time.monotonic() < deadline:  # noqa: ASYNC110 - nor does a pipe
            await asyncio.sleep(BUSY_POLL_S)

    def _copy(self) -> bool:
        """Copy as much as fits; return whether there is more."""
        self._write()
        more = False
        for path, file in list(self._files.items()):
            if self._pending:
                more = True  # the reader is slow: what it misses stays in the files
                break
            pieces, left = file.read()
            self._pending.extend(pieces)
            more = more or left
            self._write()
            if file.ended and not left:
                file.close()
                del self._files[path]
        return more or bool(self._pending)

    def _write(self) -> None:
        while self._pending and self._writable.poll(0):
            batch = bytearray(self._pending.popleft())
            while self._pending and len(batch) + len(self._pending[0]) <= MAX_WRITE_BYTES:
                batch += self._pending.popleft()
            try:
                os.write(self._descriptor, batch)
            except OSError:  # the pipe is closed, or the disk is full
                self._pending.clear()


class _EchoedFile:
    """One rank's output in one attempt, and how much of it was copied."""

    def __init__(self, path: Path, label: bytes) -> None:
        self._path = path
        self._label = label
        self._file: BinaryIO | None = None
        self._offset = 0
        self._partial_line = b""
        """The start of an incomplete line."""
        self.ended = False

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def read(self) -> tuple[list[bytes], bool]:
        """The next lines to write, and whether there is more to read."""
        try:
            descriptor, size = self._open()
            pieces = self._skip_backlog(size)
            self._offset = next_data(descriptor, self._offset)
            data = os.pread(descriptor, READ_BYTES, self._offset)
        except OSError as error:
            if error.errno == errno.ESTALE:  # another machine deleted it
                self.close()
            return [], False
        self._offset += len(data)
        more = self._offset < size
        *lines, rest = (self._partial_line + data).split(b"\n")
        for line in lines:
            pieces += self._split(line, whole=True)
        if rest and ((self.ended and not more) or len(rest) > MAX_WRITE_BYTES):
            pieces += self._split(rest, whole=False)
            rest = b""
        self._partial_line = rest
        return pieces, more

    def _open(self) -> tuple[int, int]:
        """Return the file's descriptor and size.

        It stays open until the file is deleted: each open is a request to a volume.
        """
        file = self._file
        if file is None or os.fstat(file.fileno()).st_nlink == 0:
            file = open_regular(self._path)
            self.close()
            self._file, self._offset, self._partial_line = file, 0, b""
        return file.fileno(), os.fstat(file.fileno()).st_size

    def _skip_backlog(self, size: int) -> list[bytes]:
        """Skip the backlog that the reader cannot catch up with."""
        if size < self._offset:  # the rank has truncated it
            self._offset, self._partial_line = 0, b""
        behind = size - self._offset
        if behind <= MAX_BACKLOG_BYTES:
            return []
        left_out, self._partial_line = behind - MAX_BACKLOG_BYTES // 2, b""
        self._offset += left_out
        why = f"{left_out:,} bytes are left out here, because standard output is read too slowly"
        return self._split(f"holdfast: {why}; all of it is in {self._path}".encode(), whole=True)

    def _split(self, line: bytes, *, whole: bool) -> list[bytes]:
        room = MAX_WRITE_BYTES - len(self._label) - len("+ \n")
        parts = [line[start : start + room] for start in range(0, len(line), room)] or [b""]
        ends = [*(b"+" for _ in parts[1:]), b"" if whole else b"+"]
        return [self._label + end + b" " + part + b"\n" for part, end in zip(parts, ends, strict=True)]
