"""What every connection of a run's controller to a host can do, whether ssh makes it or a node of Slurm."""

from __future__ import annotations

from typing import Protocol

from holdfast.launch.hosts.host_messages import HostReady, ToHost


class Link(Protocol):
    """The connection to one host."""

    ready: HostReady | None
    """What the host said of itself; None while it is not connected."""
    problem: str
    """Why it is not connected, and what to do; empty if it is, or before the first try has ended."""

    def send(self, message: ToHost) -> None:
        """Send a message, if the host is connected: what it misses is repeated after the next connection."""
        ...

    def close(self) -> None:
        """Let the connection end, and make no other."""
        ...
