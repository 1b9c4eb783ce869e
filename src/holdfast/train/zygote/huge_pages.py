"""Moves a process's memory into huge pages, before it is forked.

A fork copies its parent's table of pages, and frees the copy at its end: 10 ms each for the 100,000 small pages of a
process that has imported torch. Uses only the standard library of Python 3.10, as zygote_main.py does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

HUGE_PAGE = 1 << 21
_CHUNK_BYTES = 1 << 24
"""What is moved between two looks whether to stop: 10 ms of CPU time."""
_MADV_COLLAPSE = 25


def use_huge_pages(must_stop: Callable[[], bool] = lambda: False) -> None:
    """Have the kernel copy what is written so far; it may refuse, in part or (before Linux 6.1) altogether."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as file:
        regions = [line.split() for line in file]
    for place, access, _, _, inode, *_ in regions:
        first, last = (int(each, 16) for each in place.split("-"))
        first, last = -(-first // HUGE_PAGE) * HUGE_PAGE, last // HUGE_PAGE * HUGE_PAGE
        if access.startswith("rw") and access.endswith("p") and inode == "0":
            for begin in range(first, last, _CHUNK_BYTES):
                if must_stop():
                    return
                madvise(begin, min(_CHUNK_BYTES, last - begin), _MADV_COLLAPSE)
