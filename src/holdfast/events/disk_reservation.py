"""Disk space reserved for a file beyond its end.

Linux can allocate blocks without making a file longer (fallocate). Where the file system does not support this, nothing
is reserved, and a full disk shows only on write.
"""

from __future__ import annotations

import errno

from holdfast.host.sparse_files import reserve

STEP_BYTES = 16 << 10
"""Bytes that the log grows between two extensions of the reservation."""

_MIN_BYTES = 4096
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class DiskReservation:
    """Reserved space for a file that is being appended to."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self._size_bytes = size_bytes
        self._reserved_to = 0
        """Offset up to which blocks are allocated."""
        self.error: OSError | None = None
        """Why less space could be reserved than requested; None if there is enough."""

    def remaining(self, end: int) -> int:
        """Reserved bytes beyond `end`."""
        return max(0, self._reserved_to - end)

    def extend(self, end: int) -> None:
        """Reserve as much space beyond `end` as the disk has; allocates again after each `STEP_BYTES` used."""
        if self.remaining(end) >= self._size_bytes - STEP_BYTES:
            return
        size_bytes = self._size_bytes
        first: OSError | None = None
        while size_bytes >= _MIN_BYTES and end + size_bytes > self._reserved_to:
            try:
                reserve(self._descriptor, end, size_bytes)
            except OSError as error:
                first = first or error
                if error.errno not in _DISK_FULL_ERRNOS:
                    return  # not supported by this file system
                size_bytes //= 2
            else:
                self._reserved_to = end + size_bytes
                break
        self.error = first
