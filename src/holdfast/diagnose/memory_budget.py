"""Owns how much memory what is kept of a pile may take: one budget in bytes for whatever kinds there are of it.

What a thing takes is reckoned where it is kept, from measured sizes, for its time of most need. Refuses to own what is
done without: whoever finds no room counts it, and the answer says so.
"""

from __future__ import annotations

NCCL_SETUP_BYTES = 448 << 20
"""Of NCCL's set-up lines; 16,384 ranks with five communicators each take as much."""
FACTS_BYTES = 80 << 20
"""Of lines that tell and flight recorders' dumps together."""


class MemoryBudget:
    """So many bytes, of which things take theirs, and may give some back."""

    def __init__(self, max_bytes: int) -> None:
        self.left_bytes = max_bytes

    def reserve(self, size_bytes: int) -> bool:
        """Whether there is room; if so it is taken."""
        if size_bytes > self.left_bytes:
            return False
        self.left_bytes -= size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """What was needed for a while only."""
        self.left_bytes += size_bytes
