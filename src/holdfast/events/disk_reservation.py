"""Owns disk space that is kept for a file beyond its end, so that others cannot take it.

Linux can give a file blocks without making it longer (fallocate). Where the file system cannot, nothing is kept, and a
full disk is met when it is written to.
"""

from __future__ import annotations

import ctypes
import errno
import os

STEP_BYTES = 16 << 10
"""How far the log grows between two looks at the disk."""

_KEEP_SIZE = 1
_MIN_BYTES = 4096
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_libc = ctypes.CDLL(None, use_errno=True)


class DiskReservation:
    """Space for a file that is being appended to."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self._size_bytes = size_bytes
        self._reserved_to = 0
        """Offset up to which the file is known to have its blocks."""
        self.error: OSError | None = None
        """Why less could be kept than asked for; None while there is enough."""

    def remaining(self, end: int) -> int:
        """Bytes that are kept beyond an end."""
        return max(0, self._reserved_to - end)

    def extend(self, end: int) -> None:
        """Keep space beyond the end, as much as can be had; asks anew for each `HOLE_ALIGN_BYTES` that are used up."""
        if self.remaining(end) >= self._size_bytes - STEP_BYTES:
            return
        size_bytes = self._size_bytes
        first: OSError | None = None
        while size_bytes >= _MIN_BYTES and end + size_bytes > self._reserved_to:
            error = _allocate(self._descriptor, end, size_bytes)
            if error is None:
                self._reserved_to = end + size_bytes
                break
            first = first or error
            if error.errno not in _DISK_FULL_ERRNOS:
                return  # not on this file system
            size_bytes //= 2
        self.error = first


def _allocate(descriptor: int, offset: int, size_bytes: int) -> OSError | None:
    done = _libc.fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(size_bytes))
    number = ctypes.get_errno()
    return None if done == 0 else OSError(number, os.strerror(number))
