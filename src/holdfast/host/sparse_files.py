"""Reserves, frees and finds a file's blocks on the disk, none of which changes the file's size."""

from __future__ import annotations

import ctypes
import errno
import os

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def reserve(descriptor: int, offset: int, size_bytes: int) -> None:
    """Allocate blocks, also beyond the file's end; raises OSError if the disk is full or its file system cannot."""
    _fallocate(descriptor, _KEEP_SIZE, offset, size_bytes)


def punch_hole(descriptor: int, offset: int, size_bytes: int) -> None:
    """Free blocks, which then read as zeros; raises OSError if the file system cannot."""
    _fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, size_bytes)


def next_data(descriptor: int, offset: int) -> int:
    """Offset of the first data at or after `offset`: there, or after a hole, or the file's end if there is none."""
    size = os.fstat(descriptor).st_size
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            return offset  # the file system does not support SEEK_DATA, nor punching holes
        return max(offset, size)  # no data; anything written meanwhile is after the size read before


def _fallocate(descriptor: int, mode: int, offset: int, size_bytes: int) -> None:
    if _libc.fallocate(descriptor, mode, offset, size_bytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
