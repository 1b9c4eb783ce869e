"""The backend interface; launch/ implements it, and controller_main.py injects an implementation.

A backend creates nodes, reports when they are gone, and removes everything it created for them. It never sees ranks
and makes no recovery decisions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from holdfast.events import Outcome
from holdfast.findings import Finding
from holdfast.job.quarantine import MachineEvidence


class NodeId(Struct, frozen=True, kw_only=True):
    """A node slot: its number in the job and its generation, the number of times it was replaced."""

    node: int
    generation: int


class BackendNodeState(StrEnum):
    """What a backend sees of a node."""

    CREATED = "created"
    """The node exists; its agent has not connected yet."""
    UNAVAILABLE = "unavailable"
    """No machine is available; the backend creates the node as soon as one is."""
    EVICTED = "evicted"
    """The queue evicts the whole run, or the cluster takes the running node from its machine."""
    TERMINATED = "terminated"
    """The node or its agent no longer exists."""


class NodeObservation(Struct, frozen=True, kw_only=True):
    """What a backend sees of a node."""

    node_id: NodeId
    state: BackendNodeState
    reason: str = ""
    backend_id: str = ""
    """The backend's own id of a created node."""
    machine: str = ""
    """The name of a created node's machine, if machines have names here."""


class Backend(Protocol):
    """Creates and removes nodes."""

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None:
        """Create these nodes and start an agent on each; existing nodes stay unchanged.

        A node that cannot be created now is created later, unless a newer generation was requested meanwhile.
        """
        ...

    def observe(self) -> AsyncIterator[NodeObservation | Finding]:
        """Yield nodes as they are created, unavailable, evicted or terminated, including changes before the call.

        And what else happened to what runs the nodes, if the user must know of it.
        """
        ...

    def generation(self, node: int, address: str) -> int | None:
        """The generation of the node at this address; None if unknown.

        For backends that recreate nodes themselves, so that a node cannot learn its generation in advance.
        """
        ...

    async def replace_node(self, node_id: NodeId, reason: str) -> None:
        """Remove the slot's earlier generation, then submit this one."""
        ...

    async def quarantined(self) -> tuple[Finding, ...]:
        """Avoid the machines that other runs have quarantined; returns what the user does not know of that yet."""
        ...

    async def avoid_machine(
        self, node_id: NodeId, machine: str, evidence: MachineEvidence | None
    ) -> tuple[Finding, ...]:
        """Create no further node of this run on the machine of a node that failed.

        With evidence it is also remembered for later runs (job/quarantine.py), and other jobs are to avoid it where
        this run may have them do so. Without, an earlier controller has done that. Returns what the user must know.
        """
        ...

    async def cordon(self, node_id: NodeId) -> None:
        """Schedule nothing new on this node's machine."""
        ...

    async def uncordon(self, node_id: NodeId) -> None:
        """Allow this node's machine again."""
        ...

    async def report_outcome(self, outcome: Outcome, exit_code: int, reason: str) -> None:
        """Record the run's outcome where the backend has a status for it; the nodes shut down afterwards."""
        ...

    async def cancel(self) -> None:
        """Remove every node and everything created for them; returns when all of it is gone."""
        ...
