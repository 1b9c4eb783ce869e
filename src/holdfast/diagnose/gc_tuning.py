"""Owns how often Python looks for cycles while a pile is read.

What is kept of one is hundreds of thousands of small objects that hold no cycles. Python's collector goes through them
again after every 700 more, which took a seventh of the time that set-up logs are read in, and frees nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

_GC_THRESHOLD = 100_000
"""Rare, not never: a document that is parsed may leave cycles behind. So many objects are some 10 MB."""


@contextmanager
def infrequent_gc() -> Generator[None]:
    """Have the collector of cycles run after so many new objects only; afterwards it is as it was before."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _GC_THRESHOLD) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
