"""Opens files of checkpoints and caches, and tells one that is lost or spoilt from one that cannot be opened now."""

from __future__ import annotations

import errno
from io import FileIO
from pathlib import Path

from holdfast.host.files import UnexpectedFile, regular_opener

DAMAGE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""What a file that was lost or spoilt is refused with; the last two are file systems' own checksums."""


def is_damage(error: OSError) -> bool:
    """Whether this says that a file is lost or spoilt; else it may be whole, and cannot be opened now."""
    return isinstance(error, UnexpectedFile) or error.errno in DAMAGE_ERRNOS


def open_regular(path: Path) -> FileIO:
    """Open a file for reading, without a buffer; a link to one will do. Raises OSError, at once."""
    return FileIO(str(path), "r", opener=regular_opener)
