"""Heartbeat timeouts between agent and controller, derived from `recovery.node_grace_s`.

Each end detects a silent peer within a third of it, even if the connection was not closed. The node has the rest to
reconnect before it is replaced.
"""

from __future__ import annotations

from msgspec import Struct


class HeartbeatTimeouts(Struct, frozen=True, kw_only=True):
    """The parts of `recovery.node_grace_s`, in seconds."""

    node_grace_s: float

    @property
    def ping_interval_s(self) -> float:
        """From an answered ping to the next ping."""
        return self.node_grace_s / 15

    @property
    def pong_timeout_s(self) -> float:
        """Timeout for the pong; without it the peer counts as disconnected."""
        return self.node_grace_s / 5

    @property
    def close_timeout_s(self) -> float:
        """Timeout of the closing handshake, which a silent peer never answers."""
        return self.node_grace_s / 15

    @property
    def detect_s(self) -> float:
        """Longest time from a peer's last message until its connection is dropped."""
        return self.ping_interval_s + self.pong_timeout_s + self.close_timeout_s

    @property
    def reconnect_s(self) -> float:
        """From then until a node that has not reconnected counts as lost."""
        return self.node_grace_s - self.detect_s
