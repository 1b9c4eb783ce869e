"""Reduces Python's garbage collection of cycles while logs are read.

A diagnosis keeps hundreds of thousands of small objects without cycles. By default, Python's collector scans them again
after every 700 new objects, which took a seventh of the time of reading set-up logs, and frees nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

_GC_THRESHOLD = 100_000
"""Rare, not never: a parsed document may leave cycles behind. This many objects are some 10 MB."""


@contextmanager
def infrequent_gc() -> Generator[None]:
    """Makes the cycle collector run only after this many new objects; restores the previous setting afterwards."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _GC_THRESHOLD) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
