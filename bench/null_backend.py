"""A backend without nodes, for benches of everything else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from holdfast.events import Outcome
from holdfast.findings import Finding
from holdfast.job.backend import Backend, BackendNodeState, NodeId, NodeObservation
from holdfast.job.quarantine import MachineEvidence


class NullBackend(Backend):
    """A backend that creates nothing and removes nothing."""

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None: ...

    async def observe(self) -> AsyncIterator[NodeObservation]:
        await asyncio.Event().wait()
        yield NodeObservation(node_id=NodeId(node=0, generation=0), state=BackendNodeState.CREATED)

    async def replace_node(self, node_id: NodeId, reason: str) -> None: ...

    async def quarantined(self) -> tuple[Finding, ...]:
        return ()

    async def avoid_machine(
        self, node_id: NodeId, machine: str, evidence: MachineEvidence | None
    ) -> tuple[Finding, ...]:
        return ()

    async def cordon(self, node_id: NodeId) -> None: ...

    async def uncordon(self, node_id: NodeId) -> None: ...

    def generation(self, node: int, address: str) -> int | None:
        return None

    async def report_outcome(self, outcome: Outcome, exit_code: int, reason: str) -> None: ...

    async def cancel(self) -> None: ...
