"""Opens checkpoint and cache files, and distinguishes missing or damaged files from temporary failures to open."""

from __future__ import annotations

import errno
from io import FileIO
from pathlib import Path

from holdfast.host.files import UnexpectedFile, regular_opener

DAMAGE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""Errors for missing or damaged files; the last two come from checksums of file systems."""


def is_damage(error: OSError) -> bool:
    """Whether the error means a missing or damaged file; otherwise it may be intact but cannot be opened now."""
    return isinstance(error, UnexpectedFile) or error.errno in DAMAGE_ERRNOS


def open_regular(path: Path) -> FileIO:
    """Open a regular file, or a link to one, for unbuffered reading; raises OSError without blocking."""
    return FileIO(str(path), "r", opener=regular_opener)
