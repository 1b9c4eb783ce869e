"""Limits of the controller's port in one table, which the documentation shows.

Regular agents stay below all limits at any number of nodes; limits that grow with the run are marked.
"""

from __future__ import annotations

import math

from msgspec import Struct


class ApiLimits(Struct, frozen=True, kw_only=True):
    """Limits per connection, per node and for all unauthenticated clients together."""

    header_bytes: int = 16 * 1024
    """Maximum size of a request's line and headers; larger requests get status 400."""
    body_bytes: int = 64 * 1024
    """Maximum size of a request's body; larger requests get status 413."""
    message_bytes: int = 4 * 1024 * 1024
    """Maximum size of one agent message; a larger one closes its connection."""
    admission_s: float = 30.0
    """Seconds for a connection to complete TLS, authentication and one request, or to join as an agent."""
    download_s: float = 1800.0
    """Maximum seconds for a code download."""
    max_pending: int = 256
    """Maximum pending connections, plus one per node; beyond this number the oldest is closed.

    Fewer if the controller may open few files: its own descriptors stay free.
    """
    max_queued_orders: int = 1000
    """Orders queued for an agent that does not read; beyond this number its connection is closed, and it reconnects."""
    quorum_connections: int = 256
    """Connections of one node's ranks to the quorum service at a time; beyond this number, one more is refused."""
    node_bytes_per_s: float = 4 * 1024 * 1024
    """Sustained bytes per second from one node; beyond this rate the controller reads more slowly, and nothing is lost.
    """
    node_burst_bytes: float = 32 * 1024 * 1024
    """Bytes that a node may send in one burst, for example after a long disconnect."""
    message_cost_bytes: int = 4 * 1024
    """Added to each message's size, which limits the rate to 1,024 messages per second."""
    log_lines_a_minute: int = 60
    """Lines of one kind per minute in the log of a controller or an agent; further lines are counted."""


LIMITS = ApiLimits()

MIN_PENDING = 64
"""Minimum number of pending connections, in addition to the controller's own descriptors."""

CONTROLLER_FILES = 32
"""Open files that a controller needs besides those per node: the log, Python's files, starting processes."""

FILES_PER_NODE = 4
"""Per node (of a controller) or per rank (of an agent): connection, process, log, socket."""


class NodeRateLimiter:
    """Rate limiter of one node: each message takes from it, time refills it, and a deficit delays the next read."""

    def __init__(self, limits: ApiLimits) -> None:
        self._limits = limits
        self._level = limits.node_burst_bytes
        self._at = -math.inf

    def take(self, size_bytes: int, now: float) -> float:
        """Charge one message; returns the seconds to wait before the next read (`now` is monotonic)."""
        limits = self._limits
        refilled = self._level + (now - self._at) * limits.node_bytes_per_s
        self._level = min(limits.node_burst_bytes, refilled) - size_bytes - limits.message_cost_bytes
        self._at = now
        return max(0.0, -self._level / limits.node_bytes_per_s)
