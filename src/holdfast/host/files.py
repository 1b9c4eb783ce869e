"""Writes files atomically, most of them private, and reads files without trusting their content or type.

A file in a holdfast folder may be damaged or replaced: missing, a FIFO, a device or huge. Readers here return what a
regular file holds or raise `OSError`, and never block.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

LOG_TAIL_BYTES = 4096
"""Bytes at the end of a log in which its last lines are."""

MAX_SMALL_FILE_BYTES = 64 << 20
"""Largest file that is read as a whole: a thousand times the largest that holdfast writes."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


_OPEN_ERRORS = {
    errno.ENXIO: "a FIFO, a socket or a device",
    errno.EISDIR: "a folder",
    errno.ELOOP: "a link that leads to itself or is not followed",
    errno.ENOTDIR: "in something that is no folder",
}
"""Types that the kernel refuses to open."""


class UnexpectedFile(OSError):
    """A file is not what holdfast wrote there."""


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`: a new file is private to its user."""
    return os.open(path, flags, 0o600)


def regular_opener(path: str, flags: int) -> int:
    """For `open(..., opener=regular_opener)`: a private file; raises `UnexpectedFile` if it is not a regular file."""
    try:
        with contextlib.suppress(FileNotFoundError):  # the file may have to be created
            _refuse_irregular(path, os.stat(path))  # before it is opened: opening a device may have effects
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o600)  # without blocking
    except OSError as error:
        if (what := _OPEN_ERRORS.get(error.errno or 0)) and not isinstance(error, UnexpectedFile):
            raise UnexpectedFile(error.errno, f"it is {what}, not a file", path) from None
        raise
    try:
        _refuse_irregular(path, os.fstat(descriptor))  # it may have been exchanged meanwhile
    except UnexpectedFile:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_irregular(path: str, found: os.stat_result) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise UnexpectedFile(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a file", path)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; raises `UnexpectedFile` if the path is not a regular file."""
    return open(path, "rb", opener=regular_opener)


def read_small(path: Path, *, limit_bytes: int = MAX_SMALL_FILE_BYTES) -> bytes:
    """All of a file that holdfast or its user wrote.

    Raises `UnexpectedFile` if it is not a regular file, is larger than `limit_bytes`, or belongs to neither this user,
    root nor the owner of its folder.
    """
    with open_regular(path) as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner not in (os.geteuid(), 0) and owner != path.parent.stat().st_uid:
            raise UnexpectedFile(errno.EPERM, f"it belongs to another user ({owner})", str(path))
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise UnexpectedFile(errno.EFBIG, f"it is larger than {limit_bytes:,} bytes", str(path))
    return content


def read_line(path: Path) -> str:
    """The text of a small file without surrounding whitespace; raises `OSError`."""
    try:
        return read_small(path).decode().strip()
    except UnicodeDecodeError:
        raise UnexpectedFile(errno.EINVAL, "it is no text", str(path)) from None


def lines_at_end(path: Path) -> tuple[str, ...]:
    """The last lines of a log that are not empty; none if it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return tuple(line for line in file.read().decode(errors="replace").splitlines() if line.strip())
    except OSError:
        return ()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; raises `OSError`."""
    try:
        found = json.loads(read_small(path))
    except (ValueError, RecursionError) as error:
        raise UnexpectedFile(errno.EINVAL, f"it is not JSON: {error}"[:200], str(path)) from None
    if not isinstance(found, dict):
        raise UnexpectedFile(errno.EINVAL, f"it holds no JSON object: {found!r:.100}", str(path))
    return cast("dict[str, Any]", found)


def open_lock(path: Path) -> BinaryIO:
    """Open or create a lock file that only processes with write access to its folder can open.

    A process that can open a file, even read-only, can lock it and so block others. Raises `UnexpectedFile` for a
    symbolic or hard link: locking would change the mode of another file.
    """
    file = open(path, "ab", opener=lambda name, flags: regular_opener(name, flags | os.O_NOFOLLOW))  # noqa: SIM115 - locked while it is open
    found = os.fstat(file.fileno())
    wanted = stat.S_IMODE(path.parent.stat().st_mode) & 0o222
    wanted = wanted << 1 | wanted | 0o600
    if stat.S_IMODE(found.st_mode) != wanted and found.st_uid == os.geteuid():
        if found.st_nlink > 1:
            file.close()
            raise UnexpectedFile(errno.EMLINK, "it is a link to a file that has other names, not a lock", str(path))
        os.fchmod(file.fileno(), wanted)
    return file


def is_private(folder: Path) -> bool:
    """Whether it is a folder of this user that no other user may enter; raises OSError if the path does not exist."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def atomic_write(path: Path, content: bytes) -> None:
    """Write a private file atomically; concurrent readers see the old or the new content."""
    _write(path, content, private_opener)


def atomic_write_shared(path: Path, content: bytes) -> None:
    """Write a file for others atomically, such as one to commit; its mode is that of the umask."""
    _write(path, content, None)


def _write(path: Path, content: bytes, opener: Callable[[str, int], int] | None) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)  # left by an earlier process with this pid
    try:
        with open(fresh, "xb", opener=opener) as file:
            file.write(content)
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
