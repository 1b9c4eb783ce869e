"""Isolation modes of local nodes. Standard library only: supervisors import it."""

from __future__ import annotations

from enum import StrEnum


class Isolation(StrEnum):
    """How the local target isolates its nodes."""

    PROCESS = "process"
    """Each node is a process tree."""
    NETNS = "netns"
    """Each node also has its own network namespace, address and host name."""
