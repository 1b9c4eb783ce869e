"""Runs nodes as local agent processes (node_processes.py), on this machine or on the simulated ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from holdfast.events import Outcome
from holdfast.findings import Finding
from holdfast.host.files import read_line
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.quarantine import MachineEvidence
from holdfast.job.run_spec import RunSpec
from holdfast.launch.file_machine_list import simulated_names
from holdfast.launch.local.node_processes import AgentStart, NodeProcesses
from holdfast.launch.local.run_network import RunNetwork
from holdfast.launch.machine_pool import MachinePool
from holdfast.launch.quarantine_file import QuarantineFile
from holdfast.run_dir import RunDir
from holdfast.security.tokens import TokenIssuer


class LocalBackend:
    """Runs nodes as processes of this machine; `url` is the controller's address for agents."""

    def __init__(self, *, folder: RunDir, accepted: RunSpec, networks: RunNetwork, url: str) -> None:
        self._folder = folder
        self._accepted = accepted
        self._networks = networks
        self._url = url
        self._observed: asyncio.Queue[NodeObservation | Finding] = asyncio.Queue()
        self._machines = MachinePool(
            folder,
            simulated_names(accepted.capacity or accepted.job.node_slots),
            have_names=accepted.capacity is not None,
            quarantine=QuarantineFile(accepted.target),
        )
        self._pending: dict[int, NodeId] = {}
        """Nodes to start once a machine is free, by node number."""
        self._processes = NodeProcesses(folder, accepted.job.node_slots, self._on_exit)
        self._lock = asyncio.Lock()
        """Held while nodes start or stop: removal of a slot's earlier generation must not hit the next one."""
        self._cancelled = False
        """Whether `cancel` has removed the run's nodes."""

    def generation(self, node: int, address: str) -> int | None:
        """None: every agent gets its generation on its command line."""
        return None

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None:
        """Start an agent for each node that has none yet, up to the capacity."""
        async with self._lock:
            await self._submit(node_ids)

    async def _submit(self, node_ids: tuple[NodeId, ...]) -> None:
        if self._cancelled:
            return
        for node_id in node_ids:
            if not self._processes.has_agent(node_id):
                self._pending[node_id.node] = node_id
            else:
                self._watch(node_id)
        for node_id in await self._start_pending():
            if node_id in node_ids:
                self._report(node_id, BackendNodeState.UNAVAILABLE, self._unavailable_reason())

    async def _start_pending(self) -> list[NodeId]:
        """Start waiting nodes while machines are free, lowest numbers first; returns the nodes that still wait.

        Raises the first error after trying all: a node that cannot start does not block the others.
        """
        live = self._live()
        waiting, placed, failed = list[NodeId](), list[NodeId](), list[Exception]()
        for _, node_id in sorted(self._pending.items()):
            if (machine := self._machines.choose(node_id, live)) is None:
                waiting.append(node_id)
                continue
            try:
                await asyncio.to_thread(self._processes.kill_unrecorded, node_id)
                self._machines.place(node_id, machine)
            except OSError as error:
                failed.append(error)
                continue
            live.append(node_id)
            placed.append(node_id)
        failed += await self._start_all(placed)
        if failed:
            raise failed[0]
        return waiting

    async def _start_all(self, placed: list[NodeId]) -> list[Exception]:
        """Start the agents of placed nodes; returns what prevented that, and such nodes stay pending."""
        failed = list[Exception]()
        for node_id in placed:
            try:
                self._processes.start(node_id, self._agent_start(node_id))
            except Exception as error:
                failed.append(error)
                continue
            self._on_start(node_id)
        return failed

    def _on_start(self, node_id: NodeId) -> None:
        del self._pending[node_id.node]
        self._watch(node_id)

    def _unavailable_reason(self) -> str:
        return self._machines.unavailable_reason()

    def _live(self) -> list[NodeId]:
        return [node_id for node_id in self._processes.existing() if self._processes.alive(node_id)]

    def observe(self) -> AsyncIterator[NodeObservation | Finding]:
        """Node starts and failures, and agent exits, including those without a running controller."""
        for node_id in self._processes.existing():
            self._watch(node_id)
        return self._observations()

    async def _observations(self) -> AsyncIterator[NodeObservation | Finding]:
        while True:
            yield await self._observed.get()

    async def replace_node(self, node_id: NodeId, reason: str) -> None:
        """Remove the slot's earlier generations, then start this one, if a machine is free."""
        async with self._lock:
            for former in self._processes.existing():
                if former.node == node_id.node and former.generation < node_id.generation:
                    await asyncio.to_thread(self._remove, former)
            await self._submit((node_id,))

    async def quarantined(self) -> tuple[Finding, ...]:
        """Nothing to do: nodes are never placed there, and the start of the run said so (local_preflight.py)."""
        return ()

    async def avoid_machine(
        self, node_id: NodeId, machine: str, evidence: MachineEvidence | None
    ) -> tuple[Finding, ...]:
        """Use another simulated machine if one is free; else it is impossible: all nodes are on this machine."""
        others = [other for other in self._live() if other.node != node_id.node]
        remedy = "If the device fails again, repair it, or run the job on a target with other machines."
        return await self._machines.avoid_failed(node_id.node, machine, others, evidence, remedy=remedy)

    async def cordon(self, node_id: NodeId) -> None:
        """Take a simulated machine out of use."""
        self._machines.cordon(node_id)

    async def uncordon(self, node_id: NodeId) -> None:
        """Use it again, and start a node that waits for it."""
        self._machines.uncordon(node_id)
        async with self._lock:
            await self._start_pending()

    async def report_outcome(self, outcome: Outcome, exit_code: int, reason: str) -> None:
        """Nothing to do: the run's folder has the outcome."""

    async def cancel(self) -> None:
        """Remove every node: processes, sockets, namespaces."""
        async with self._lock:
            self._cancelled = True
            self._pending.clear()
            for node_id in self._processes.existing():
                await asyncio.to_thread(self._remove, node_id)
            await asyncio.to_thread(self._networks.remove)

    def _agent_start(self, node_id: NodeId) -> AgentStart:
        node = self._networks.add_node(node_id.node)
        job = self._accepted.job
        return AgentStart(
            url=self._url,
            token=TokenIssuer(read_line(self._folder.token)).node_token(node_id.node, node_id.generation),
            address=node.address,
            controller_grace_s=job.recovery.controller_grace_s,
            node_grace_s=job.recovery.node_grace_s,
            stop_grace_s=job.recovery.stop_grace_s,
            memory_bytes=job.resources.memory,
            command_prefix=node.command_prefix,
        )

    def _watch(self, node_id: NodeId) -> None:
        """Report when a node's agent ends, or that it already has."""
        if self._processes.watch(node_id):
            self._report(node_id, BackendNodeState.CREATED, machine=self._machines.name_of(node_id))

    def _on_exit(self, node_id: NodeId, reason: str) -> None:
        self._report(node_id, BackendNodeState.TERMINATED, reason)

    def _report(self, node_id: NodeId, state: BackendNodeState, reason: str = "", *, machine: str = "") -> None:
        self._observed.put_nowait(NodeObservation(node_id=node_id, state=state, reason=reason, machine=machine))

    def _remove(self, node_id: NodeId) -> None:
        """Kill all processes of a node, as when a machine dies."""
        self._processes.remove(node_id)
        self._networks.remove_node(node_id.node)
