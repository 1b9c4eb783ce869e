"""Moves a process's memory into huge pages, before it is forked.

A fork copies its parent's table of pages, and frees the copy at its end: 10 ms each for the 100,000 small pages of a
process that has imported torch. Uses only the standard library of Python 3.10, as zygote_main.py does.
"""

from __future__ import annotations

import ctypes

HUGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25


def use_huge_pages() -> None:
    """Have the kernel copy what is written so far; it may refuse, in part or (before Linux 6.1) altogether."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as file:
        regions = [line.split() for line in file]
    for place, access, _, _, inode, *_ in regions:
        begin, end = (int(each, 16) for each in place.split("-"))
        begin, end = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if access.startswith("rw") and access.endswith("p") and inode == "0" and begin < end:
            madvise(begin, end - begin, _MADV_COLLAPSE)
