"""Finds what a reader lacks of a run's event log and rank logs, and writes it there.

Ranks can write in the folders of the logs, so nothing there is trusted: no link is followed, and no pipe is opened.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from holdfast.host.files import open_regular, regular_opener
from holdfast.run_dir import EVENTS_NAME, TRACE_NAME, RunDir

CHUNK_BYTES = 1 << 18
"""Most bytes of a file that are sent at a time."""

MAX_LOG_BYTES = 64 << 20
"""A reader that has nothing of a rank's log gets at most this much of its end; a hole in the reader's file marks the
dropped part. A multiple of every file system's block size."""

SYNCED_FILES = re.compile(
    re.escape(EVENTS_NAME)
    + r"|logs/[-a-z0-9]{1,64}/rank-\d{1,9}\.log"
    + r"|nodes/node\d{1,6}\.\d{1,9}/(agent\.log|evidence/[-a-z0-9]{1,64}(/[A-Za-z0-9][-_.A-Za-z0-9]{0,127}){1,2})"
    + r"|traces/"
    + TRACE_NAME.pattern
)
"""Files of a run's folder that are sent; the reader accepts no others."""
LOG_TAIL_KEY, LOG_TAIL_BYTES = "log_tail_crc", 4096
"""Key of the checksum of the last LOG_TAIL_BYTES bytes of the reader's event log."""


def log_tail_crc(log: Path, size: int) -> int:
    """Checksum of the last bytes before `size` in a log; -1 if there is no log."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, size - LOG_TAIL_BYTES))
            return zlib.crc32(file.read(min(size, LOG_TAIL_BYTES)))
    except FileNotFoundError:
        return -1


def changes(folder: RunDir, sent: dict[str, int], *, with_log: bool) -> Iterator[tuple[str, int, int]]:
    """Byte ranges of files to send. The event log is read first and sent last, so all that it mentions has arrived."""
    log, known = folder.events, sent.get(folder.events.name, 0)
    end = _whole_lines(log, known) if with_log else known
    # Ranks can create anything there: a link to a file or folder of another run, or a pipe that never ends.
    folders = (*folder.path.glob("logs/*"), *folder.path.glob("traces/*"))
    attempts = (path for path in folders if stat.S_ISDIR(path.lstat().st_mode))
    for path in (path for attempt in attempts for path in attempt.glob("*")):
        name = str(path.relative_to(folder.path))
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            continue
        if SYNCED_FILES.fullmatch(name) and (size := about.st_size) != (at := sent.get(name, 0)):
            at = 0 if size < at else at  # its rank has truncated it
            yield name, max(at, _aligned(size - MAX_LOG_BYTES)), size
    if end != known:
        yield log.name, min(end, known), end


def _aligned(offset: int) -> int:
    return max(0, offset - offset % (1 << 20))


def _whole_lines(log: Path, known: int) -> int:
    """End offset of the last complete line after offset `known`, up to which lines are known to be complete."""
    try:
        with open_regular(log) as file:
            size = os.fstat(file.fileno()).st_size
            if size < known:
                return 0  # of an earlier incarnation: send it from the start
            file.seek(known)
            end = known
            while data := file.read(CHUNK_BYTES):
                newline = data.rfind(b"\n")
                end = file.tell() - len(data) + newline + 1 if newline >= 0 else end
            return end
    except FileNotFoundError:
        return known


def read_range(path: Path, at: int, end: int) -> Iterator[tuple[int, bytes]]:
    """A byte range of a file in chunks, each with its offset; raises OSError."""
    with open(path, "rb", opener=open_no_symlink) as file:
        file.seek(at)
        while at < end and (data := file.read(min(CHUNK_BYTES, end - at))):
            yield at, data
            at += len(data)


def write_at(path: Path, at: int, data: bytes) -> None:
    """Write a chunk at its offset and truncate after it; the rest is from an earlier incarnation of the file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with open(descriptor, "wb") as file:
        file.truncate(at)
        file.seek(at)
        file.write(data)


def open_no_symlink(path: str, flags: int) -> int:
    """Opener for `open` that refuses links and files in linked folders.

    A link in a folder that ranks can write may point to a file that only this pod may read.
    """
    parent, name = os.path.split(path)
    folder = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        return regular_opener(f"/proc/self/fd/{folder}/{name}", flags | os.O_NOFOLLOW)
    finally:
        os.close(folder)
