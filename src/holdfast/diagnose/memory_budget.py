"""The memory budget for all data kept from the input.

Each reader computes an item's size from measured values at peak use. A reader that gets no memory counts what it drops,
and the diagnosis reports it.
"""

from __future__ import annotations

NCCL_SETUP_BYTES = 448 << 20
"""For NCCL's set-up lines; 16,384 ranks with five communicators each need as much."""
FACTS_BYTES = 80 << 20
"""For matched lines and flight recorder dumps together."""


class MemoryBudget:
    """A number of bytes, from which readers take, and to which they may return some."""

    def __init__(self, max_bytes: int) -> None:
        self.left_bytes = max_bytes

    def reserve(self, size_bytes: int) -> bool:
        """Takes the bytes if available; returns whether they were."""
        if size_bytes > self.left_bytes:
            return False
        self.left_bytes -= size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Returns bytes that were needed only for a while."""
        self.left_bytes += size_bytes
