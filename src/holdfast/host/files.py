"""Writes private files, whole or not at all, and reads files without trusting what is there.

A file in a folder of holdfast's may have been damaged or replaced: it may be missing, a FIFO, a device or huge.
Readers here return what a plain file holds, or raise `OSError`, and never wait.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, cast

MAX_SMALL_FILE_BYTES = 64 << 20
"""Largest file that is read as a whole: a thousand times what any of ours holds."""

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
"""What the kernel refuses to open."""


class UnexpectedFile(OSError):
    """A file is not what holdfast wrote there."""


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private)`: a file that it makes is its user's alone."""
    return os.open(path, flags, 0o600)


def regular_opener(path: str, flags: int) -> int:
    """For `open(..., opener=plain)`: a private file, and `UnexpectedFile` where something else than a file is there."""
    try:
        with contextlib.suppress(FileNotFoundError):  # it may be one to make
            _refuse_irregular(path, os.stat(path))  # before it is opened: to open a device may do something
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o600)  # nothing is waited for
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
    """Open a file for reading; raises `UnexpectedFile` where something else than a file is there."""
    return open(path, "rb", opener=regular_opener)


def read_small(path: Path, *, limit_bytes: int = MAX_SMALL_FILE_BYTES) -> bytes:
    """All of a file that holdfast or its user wrote.

    Raises `UnexpectedFile` for what is no file, is larger than any of ours, or belongs to neither this user nor root
    nor the owner of its folder.
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
    """The words in a small file, without what is around them; raises `OSError`."""
    try:
        return read_small(path).decode().strip()
    except UnicodeDecodeError:
        raise UnexpectedFile(errno.EINVAL, "it is no text", str(path)) from None


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
    """Open a file to lock, made where there is none, which only those who may write its folder can open.

    Whoever can open a file, if only for reading, can lock it, and so keep others away for as long as they like. Raises
    `UnexpectedFile` for a link of either kind: the mode of another file would be changed.
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
    """Whether it is a folder of this user that nobody else may enter; raises OSError where nothing is there."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def atomic_write(path: Path, content: bytes) -> None:
    """Have a private file hold this; who reads it meanwhile finds what was there before, whoever else puts it too."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)  # of an earlier process with this number
    try:
        with open(fresh, "xb", opener=private_opener) as file:
            file.write(content)
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
