"""Opens a file for reading only if it is a regular one: a FIFO, a device or a folder in its place must not block."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


OF_DAMAGE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""What a file that was lost or spoilt is refused with; the last two are file systems' own checksums."""


class NotRegularError(OSError):
    """What is there is no file that bytes can be read from again."""


def is_damage(error: OSError) -> bool:
    """Whether this says that a file is lost or spoilt; else it may be whole, and cannot be opened now."""
    return isinstance(error, NotRegularError) or error.errno in OF_DAMAGE


def open_regular(path: Path) -> FileIO:
    """Open a file for reading, without a buffer; a link to one will do. Raises OSError, at once."""
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise NotRegularError(errno.ELOOP, "a loop of links is where a file should be", str(path)) from None
    _refuse_irregular(path, found)  # before it is opened: to open a device may do something
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _refuse_irregular(path, os.fstat(file))
        return FileIO(file, "r")
    except BaseException:
        os.close(file)
        raise


def _refuse_irregular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((words for is_of, words in _KINDS if is_of(found.st_mode)), "something else")
        raise NotRegularError(errno.EINVAL, f"{kind} is where a file should be", str(path))
