"""Runs nodes as local agent processes that Monarch starts and watches; what happens inside a node is the agent's word.

An agent outlives its Monarch process for the moment until this backend kills it. So a node ends with its process mesh.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from holdfast.findings import Finding
from holdfast.host.processes import kill_all
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.run_spec import RunSpec
from holdfast.launch.local.local_backend import LocalBackend
from holdfast.launch.local.run_network import RunNetwork
from holdfast.launch.monarch.mesh_watch import MeshWatch, mesh_process
from holdfast.launch.monarch.monarch_link import MonarchLink
from holdfast.launch.monarch.monarch_messages import (
    ORDER_NAME,
    AgentEnded,
    AgentPlacement,
    FromClient,
    MeshLost,
    write_order,
)
from holdfast.run_dir import RunDir

KILL_TIMEOUT_S = 10.0
REASON_WAIT_S = 0.3
"""Time that Monarch has to report how an agent ended, whose end is seen here immediately."""


class MonarchBackend(LocalBackend):
    """Like the local backend, but agents are children of Monarch's processes."""

    def __init__(self, *, folder: RunDir, accepted: RunSpec, networks: RunNetwork, url: str) -> None:
        super().__init__(folder=folder, accepted=accepted, networks=networks, url=url)
        self._link = MonarchLink(folder, on_message=self._on_message, on_lost=self._on_client_lost)
        self._meshes = MeshWatch(folder, self._processes)
        self._over: set[NodeId] = set()
        """Nodes whose end was reported."""

    def observe(self) -> AsyncIterator[NodeObservation | Finding]:
        """The same as on the local target, and each loss of Monarch's client."""
        self._link.start()
        return super().observe()

    async def cancel(self) -> None:
        """Remove every node, and Monarch's processes."""
        self._cancelled = True
        for node_id in self._processes.existing():
            self._meshes.forget(node_id)
        await self._link.close()
        await super().cancel()
        for order in self._folder.nodes.glob(f"*/{ORDER_NAME}"):  # of a controller that died, with the environment
            order.unlink(missing_ok=True)

    async def _start_all(self, placed: list[NodeId]) -> list[Exception]:
        """The same, all together: Monarch takes 0.3 s for each."""
        failed = await asyncio.gather(*map(self._try_start, placed))
        return [error for error in failed if error is not None]

    async def _try_start(self, node_id: NodeId) -> Exception | None:
        try:
            await self._start(node_id)
        except Exception as error:
            return error
        self._on_start(node_id)
        return None

    async def _start(self, node_id: NodeId) -> None:
        slots = self._accepted.job.node_slots
        order = write_order(self._folder, slots, node_id, self._agent_start(node_id))
        try:
            await self._link.place(node_id, AgentPlacement(order=str(order)))
        finally:
            order.unlink(missing_ok=True)

    def _watch(self, node_id: NodeId) -> None:
        super()._watch(node_id)
        self._meshes.watch(node_id)

    def _on_message(self, message: FromClient) -> None:
        match message:
            case AgentEnded(reason=reason):
                self._report_end(message.node_id, reason)
            case MeshLost(reason=reason):
                self._meshes.fence(message.node_id, f"Monarch: {reason}")
            case _:
                pass

    def _on_client_lost(self, lost: Finding) -> None:
        for node_id in self._live():
            self._meshes.fence(node_id, lost.what)
        self._observed.put_nowait(lost)

    def _on_exit(self, node_id: NodeId, reason: str) -> None:
        asyncio.get_running_loop().call_later(REASON_WAIT_S, self._report_end, node_id, reason)

    def _report_end(self, node_id: NodeId, reason: str) -> None:
        if node_id not in self._over:
            self._over.add(node_id)
            self._report(node_id, BackendNodeState.TERMINATED, self._meshes.take_reason(node_id, reason))

    def _remove(self, node_id: NodeId) -> None:
        self._meshes.forget(node_id)
        super()._remove(node_id)
        # Monarch stops the mesh of an agent that has ended, unless the process is stuck.
        if (mesh := mesh_process(self._folder, node_id)) is not None:
            kill_all(lambda: [mesh.pid] if mesh.alive else [], within_s=KILL_TIMEOUT_S)
