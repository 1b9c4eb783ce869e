"""Owns how long each end of a connection waits for the other, all of it out of `recovery.node_grace_s`.

Either end notices a peer that is silent, whether or not its connection was closed, within a third of that; the rest is
the time that the node has to come back before it is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HeartbeatTimeouts:
    """The parts of a node's grace, in seconds."""

    node_grace_s: float

    @property
    def ping_interval_s(self) -> float:
        """Between one sign of life that was answered and the next that is asked for."""
        return self.node_grace_s / 15

    @property
    def pong_timeout_s(self) -> float:
        """For the answer; without it the peer is taken to be gone."""
        return self.node_grace_s / 5

    @property
    def close_timeout_s(self) -> float:
        """For a silent peer to agree to the end of its connection, which it will not do."""
        return self.node_grace_s / 15

    @property
    def detect_s(self) -> float:
        """From a peer's last word until its connection is given up, at most."""
        return self.ping_interval_s + self.pong_timeout_s + self.close_timeout_s

    @property
    def reconnect_s(self) -> float:
        """From there until a node that has not come back counts as lost."""
        return self.node_grace_s - self.detect_s
