"""Owns how much the controller's port takes from anybody: one table, which the documentation shows.

An honest agent meets none of them, however many there are: those that grow with the run say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ApiLimits:
    """What one connection, one node and all strangers together may ask of a controller."""

    header_bytes: int = 16 * 1024
    """A request's line and headers; more is refused with 400."""
    body_bytes: int = 64 * 1024
    """A request's body; more is refused with 413."""
    message_bytes: int = 4 * 1024 * 1024
    """One word of an agent; a larger one closes its connection."""
    admission_s: float = 30.0
    """Seconds a connection has to be encrypted, admitted, heard and answered, or to join as an agent."""
    download_s: float = 1800.0
    """Seconds that pulling the code may take."""
    max_pending: int = 256
    """Connections that may be on that way at once, beside one for each node; beyond them the oldest is cut off.

    Fewer where a controller may open few files: what it needs itself stays free.
    """
    max_queued_orders: int = 1000
    """Orders that may wait for an agent that does not read; then its connection is cut off, and it joins again."""
    node_bytes_per_s: float = 4 * 1024 * 1024
    """What is read from one node in the long run; beyond it the controller reads more slowly, and nothing is lost."""
    node_burst_bytes: float = 32 * 1024 * 1024
    """What a node may say at once, as after a long absence."""
    message_cost_bytes: int = 4 * 1024
    """Added to each word, and so the bound on their number: 1,024 a second."""
    log_lines_a_minute: int = 60
    """Lines of one kind in the log of a controller or an agent; the rest are counted."""


LIMITS = ApiLimits()

MIN_PENDING = 64
"""Connections that must find descriptors beside what a controller needs itself."""

CONTROLLER_FILES = 32
"""Open files that a controller needs beside those for each node: the log, what Python has open, what it is starting."""

FILES_PER_NODE = 4
"""For each node (of a controller) or rank (of an agent): connection, process, log, socket."""


class NodeRateLimiter:
    """What one node may still say: drained by what it says, filled by time. A debt is paid by waiting."""

    def __init__(self, limits: ApiLimits) -> None:
        self._limits = limits
        self._level = limits.node_burst_bytes
        self._at = -math.inf

    def take(self, size_bytes: int, now: float) -> float:
        """Take one word's size out; the seconds to wait before the next word is read (`now` is monotonic)."""
        limits = self._limits
        filled = self._level + (now - self._at) * limits.node_bytes_per_s
        self._level = min(limits.node_burst_bytes, filled) - size_bytes - limits.message_cost_bytes
        self._at = now
        return max(0.0, -self._level / limits.node_bytes_per_s)
