"""Owns what a place to run must be able to do; implementations are in launch/, and api injects one.

A back end owns nodes: it makes them, says when they are gone, and removes every trace of them. It never sees ranks
and takes no decision.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from holdfast.events import Outcome


@dataclass(frozen=True, kw_only=True)
class NodeId:
    """One node slot to be filled: its number in the job and how often it has been replaced."""

    node: int
    generation: int


class BackendNodeState(StrEnum):
    """What a back end sees of a node."""

    CREATED = "created"
    """It exists, and its agent is on its way."""
    UNAVAILABLE = "unavailable"
    """There is no machine for it now; it is made, unasked, as soon as there is one."""
    EVICTED = "evicted"
    """It is there, and its queue takes it back: the whole run is to wait for admission again."""
    TERMINATED = "terminated"
    """It, or the agent on it, has ceased to exist."""


@dataclass(frozen=True, kw_only=True)
class NodeObservation:
    """What a back end sees of a node."""

    node_id: NodeId
    state: BackendNodeState
    reason: str = ""
    backend_id: str = ""
    """What the back end knows a node by that is made."""


class Backend(Protocol):
    """A place where nodes come from."""

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None:
        """Make these nodes and start an agent on each; a node that exists already is left alone.

        One that cannot be made now is made as soon as it can, unless a later generation has been asked for by then.
        """
        ...

    def observe(self) -> AsyncIterator[NodeObservation]:
        """Nodes as they are made, found unavailable, evicted or gone; what happened while nobody looked included."""
        ...

    def generation(self, node: int, address: str) -> int | None:
        """Which generation of a node it is that asks from an address; None while, or where, that is not known.

        For places whose nodes come to life again by themselves, and cannot be told beforehand which life it is.
        """
        ...

    async def replace_node(self, node_id: NodeId, reason: str) -> None:
        """Remove what is left of the slot's earlier generation, then submit this one."""
        ...

    async def cordon(self, node_id: NodeId) -> None:
        """Put nothing new on the machine under this node."""
        ...

    async def uncordon(self, node_id: NodeId) -> None:
        """Use the machine that was under this node again."""
        ...

    async def report_outcome(self, outcome: Outcome, exit_code: int, reason: str) -> None:
        """Say how the run ended wherever the place has a word for it; its nodes are told to leave after this."""
        ...

    async def cancel(self) -> None:
        """Remove every node and all that was made for them; returns when nothing is left."""
        ...
