"""Owns in what ways the nodes of a local run can be kept apart. Standard library only: keepers import it."""

from __future__ import annotations

from enum import StrEnum


class Isolation(StrEnum):
    """How the local back end keeps its nodes apart."""

    PROCESS = "process"
    """Each node is a tree of processes."""
    NETNS = "netns"
    """Each node also has a network namespace of its own, with its own address and name."""
