"""Places nodes on hosts that are connected to the controller, one node each; host_process.py starts and removes them.

How hosts are connected is up to the target: over ssh (hosts_backend.py), or by themselves (slurm/slurm_backend.py). The
run's folder on this machine records which host has which node, and receives what the node writes.

The file is long because placing, removing and reconnecting change one state: any message of a host may move nodes.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.events import Outcome
from holdfast.findings import Finding
from holdfast.host.files import read_line, read_small
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.quarantine import MachineEvidence
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Orchestrator
from holdfast.launch.changed_files import write_at
from holdfast.launch.code.archive import archive_path
from holdfast.launch.hosts.host_messages import (
    MAX_SMALL_CODE_BYTES,
    EndAnnounced,
    EndRun,
    FileChunk,
    FromHost,
    HostBusy,
    HostReady,
    HostReserved,
    NodeEnded,
    NodeNotStarted,
    NodePrepared,
    NodeRemoved,
    NodeRunning,
    RemoveNode,
    RunEnded,
    Setup,
    SmallCode,
    StartNode,
    WatchNode,
)
from holdfast.launch.hosts.host_reservation import HostReservation
from holdfast.launch.hosts.link import Link
from holdfast.launch.local.node_processes import existing_nodes, write_token
from holdfast.launch.machine_pool import MachinePool
from holdfast.launch.monarch.monarch_messages import AgentPlacement
from holdfast.launch.quarantine_file import QuarantineFile
from holdfast.run_dir import RunDir
from holdfast.security.tokens import TokenIssuer

if TYPE_CHECKING:
    from holdfast.launch.monarch.linked_meshes import LinkedMeshes

REMOVE_TIMEOUT_S = 15.0
"""Longest wait until a connected host has killed a node's processes."""
END_TIMEOUT_S = 15.0
"""Longest wait for hosts that are not connected when the run ends; their agents end without a controller."""
CREATED_NAME = "created"
BUSY_RETRY_S = 5.0
"""Time until a host that was in use is tried again."""
RESERVE_RETRY_S = (0.3, 1.2)
"""Least and most seconds until a run tries again to reserve all of its hosts; by chance, so that one of two that take
hosts from each other is first."""


class LinkedHosts(ABC):
    """Places nodes on hosts by their links; with Monarch, its client listens at `monarch_at`, an address and a port."""

    def __init__(
        self, folder: RunDir, accepted: RunSpec, hosts: tuple[str, ...], *, monarch_at: tuple[str, int]
    ) -> None:
        self._folder, self._accepted, self._job = folder, accepted, accepted.job
        self._observed: asyncio.Queue[NodeObservation | Finding] = asyncio.Queue()
        self._machines = MachinePool(folder, hosts, have_names=True, quarantine=QuarantineFile(accepted.target))
        self._links: dict[str, Link] = {}
        """By host."""
        self._running: list[asyncio.Task[None]] = []
        """What keeps hosts connected."""
        self._pending: dict[int, NodeId] = {}
        """Nodes to start once a host is free, by node number."""
        self._refused: dict[str, str] = {}
        """Why hosts that are connected did not start a node, for some time."""
        self._ended: set[NodeId] = set()
        """Nodes whose agent has ended, or that are not on their host."""
        self._reported: dict[NodeId, str] = {}
        """What was last reported of a waiting node."""
        self._removed: dict[NodeId, asyncio.Event] = {}
        """Nodes that are to be removed."""
        self._reservation = HostReservation(self._links)
        self._cancelled = False
        self._nodes_removed = False
        """Whether hosts may delete the run's files, which another host may share."""
        self._meshes = self._make_meshes(*monarch_at)
        self._fenced: dict[NodeId, str] = {}
        """Why nodes are removed whose end is reported then."""

    @abstractmethod
    def _others_compete(self) -> bool:
        """Whether other runs may take hosts, so that all are reserved before a node starts."""

    @abstractmethod
    def _connect(self) -> None:
        """Begin to connect hosts, unless that has begun."""

    @abstractmethod
    def _may_place(self) -> bool:
        """Whether enough is known of the hosts to choose among them."""

    @abstractmethod
    def _address(self, host: str) -> str:
        """The address by which other hosts reach this one; empty for its own end of the connection."""

    @abstractmethod
    async def _before_cancel(self) -> None:
        """Wait until it is known which hosts can be reached."""

    @abstractmethod
    async def _after_cancel(self) -> None:
        """Wait until hosts have deleted the run's files, and give them back."""

    def _mesh_at(self, host: str) -> tuple[str, int]:
        """Where Monarch's process of a node listens on a connected host: its address, and a port or 0 for any."""
        there = self._links[host].ready
        assert there is not None, "nodes start on hosts that are connected"
        return there.address, 0

    def _tunnel(self, host: str, mesh: str) -> tuple[str, ...]:
        """The command that lets Monarch's client and its process at `mesh` reach one another; empty if they do."""
        return ()

    def _why_waiting(self) -> str:
        """Why no host is free; empty if that is not known yet."""
        why = "; ".join(f"{host}: {reason}" for host, reason in sorted(self._unusable().items()))
        return f"no host is free. {why}" if why else self._machines.unavailable_reason()

    def generation(self, node: int, address: str) -> int | None:
        """None: every agent gets its generation on its command line."""
        return None

    async def submit(self, node_ids: tuple[NodeId, ...]) -> None:
        """Place each node that has no host yet."""
        known = self._existing()
        for node_id in node_ids:
            if node_id not in known:
                self._pending[node_id.node] = node_id
        self._connect()
        self._place()

    async def observe(self) -> AsyncIterator[NodeObservation | Finding]:
        """Nodes as hosts start them, or say that they have ended; a host that is silent says nothing of its node."""
        self._connect()
        if self._meshes is not None:
            self._meshes.start()
        while True:
            yield await self._observed.get()

    async def replace_node(self, node_id: NodeId, reason: str) -> None:
        """Remove the slot's earlier generations where that is possible now, and place this one."""
        former = [old for old in self._existing() if old.node == node_id.node and old.generation < node_id.generation]
        await asyncio.gather(*map(self._remove, former))
        await self.submit((node_id,))

    async def quarantined(self) -> tuple[Finding, ...]:
        """Nothing to do: nodes are never placed there, and the start of the run said so."""
        return ()

    async def avoid_machine(
        self, node_id: NodeId, machine: str, evidence: MachineEvidence | None
    ) -> tuple[Finding, ...]:
        """Use another host if one is free."""
        others = [other for other in self._occupied() if other.node != node_id.node]
        remedy = "Add machines to the target, or repair this one."
        return await self._machines.avoid_failed(node_id.node, machine, others, evidence, remedy=remedy)

    async def cordon(self, node_id: NodeId) -> None:
        """Place nothing more on this node's host."""
        self._machines.cordon(node_id)

    async def uncordon(self, node_id: NodeId) -> None:
        """Use its host again."""
        self._machines.uncordon(node_id)
        self._place()

    async def report_outcome(self, outcome: Outcome, exit_code: int, reason: str) -> None:  # noqa: B027 - no subclass has more to do
        """Nothing to do: the run's folder has the outcome."""

    async def cancel(self) -> None:
        """Remove every node and the run's files on every host that answers."""
        self._cancelled = True
        self._pending.clear()
        if self._meshes is not None:
            await self._meshes.close()
        self._connect()
        await self._before_cancel()
        await asyncio.gather(*(self._remove(node_id, within_s=END_TIMEOUT_S) for node_id in self._existing()))
        self._nodes_removed = True
        for link in self._links.values():
            if link.ready:
                link.send(EndRun())
            else:
                link.close()
        await self._after_cancel()
        for task in self._running:
            task.cancel()

    def _setup(self, host: str, address: str, port: int, *, exclusive: bool) -> Setup:
        """The first message to a host, which reaches the controller at this address and port."""
        files = (*self._folder.path.glob("logs/*/*"), *self._folder.path.glob("nodes/**/*"))
        return Setup(
            run=self._folder.run_id,
            node_slots=self._job.node_slots,
            ca=read_small(self._folder.ca).decode(),
            controller_host=address,
            controller_port=port,
            nodes=tuple((node_id.node, node_id.generation) for node_id in self._nodes_on(host)),
            exclusive=exclusive,
            sizes={str(path.relative_to(self._folder.path)): path.stat().st_size for path in files if path.is_file()},
        )

    def _nodes_on(self, host: str) -> list[NodeId]:
        """Nodes that were placed on a host and not removed."""
        return [node_id for node_id in self._existing() if self._machines.machine(node_id) == host]

    def _existing(self) -> list[NodeId]:
        """Nodes that may have processes on a host."""
        return existing_nodes(self._folder, self._job.node_slots)

    def _occupied(self) -> list[NodeId]:
        """Nodes that keep their host from being used."""
        return [node_id for node_id in self._existing() if node_id not in self._ended]

    def _place(self) -> None:
        """Start waiting nodes while hosts are free, lowest numbers first; report those that wait, once per reason.

        Until a node of the run has started, none does unless there are hosts for all that the job needs: a run that
        kept some hosts while it waits for others would keep other runs from them.
        """
        if self._cancelled or not self._pending:
            return
        reserved: Collection[str] = self._machines.names
        if self._others_compete() and not self._occupied() and not (reserved := self._reserve()):
            return
        unusable = {*self._unusable()} | {*self._machines.names} - {*reserved}
        for number, node_id in sorted(self._pending.items()):
            host = self._machines.choose(node_id, self._occupied(), unusable) if self._may_place() else None
            if host is None:
                self._report_waiting(node_id)
            else:
                del self._pending[number]
                self._start(node_id, host)
        self._reservation.release(used={self._machines.machine(node_id) for node_id in self._occupied()})

    def _reserve(self) -> Collection[str]:
        """Hosts that are kept for this run; none until there are as many as its job needs.

        If there are too few, others may have them, and nodes wait; the run tries again later if one was refused.
        """
        unusable, wanted = self._unusable(), len(self._pending)
        free = [host for host in self._machines.free(()) if host not in unusable]
        if self._may_place() and self._reservation.request(free, least=min(wanted, self._job.nodes.min), most=wanted):
            return self._reservation.kept()
        if self._reservation.release():
            asyncio.get_running_loop().call_later(random.uniform(*RESERVE_RETRY_S), self._reserve_again)
        for node_id in self._pending.values():
            self._report_waiting(node_id)
        return ()

    def _reserve_again(self) -> None:
        self._refused.clear()
        self._place()

    def _unusable(self) -> dict[str, str]:
        """Why hosts cannot take a node now."""
        found = dict(self._refused)
        for host, link in self._links.items():
            if link.ready is None:
                found[host] = link.problem or "it is being connected"
            elif link.ready.gpus < self._job.gpus_per_node:
                found[host] = f"it has {link.ready.gpus} GPUs, and a node needs {self._job.gpus_per_node}"
        return found

    def _report_waiting(self, node_id: NodeId) -> None:
        reason = self._why_waiting()
        if reason and self._reported.get(node_id) != reason:
            self._reported[node_id] = reason
            self._report(node_id, BackendNodeState.UNAVAILABLE, reason)

    def _start(self, node_id: NodeId, host: str) -> None:
        self._machines.place(node_id, host)
        token = TokenIssuer(read_line(self._folder.token)).node_token(node_id.node, node_id.generation)
        write_token(self._folder, node_id, token)
        self._ended.discard(node_id)
        self._send_start(node_id, host)

    def _send_start(self, node_id: NodeId, host: str) -> None:
        recovery = self._job.recovery
        token = read_line(self._folder.node_dir(node_id.node, node_id.generation) / "token")
        self._links[host].send(
            StartNode(
                node=node_id.node,
                generation=node_id.generation,
                token=token,
                address=self._address(host),
                controller_grace_s=recovery.controller_grace_s,
                node_grace_s=recovery.node_grace_s,
                stop_grace_s=recovery.stop_grace_s,
                memory_bytes=self._job.resources.memory,
                code=self._small_code(),
                mesh=self._meshes.identity(*self._mesh_at(host)) if self._meshes is not None else None,
            )
        )

    def _small_code(self) -> SmallCode | None:
        """The code that the run was started with, if it fits into a message."""
        code = self._accepted.code
        if code is None or code.bytes > MAX_SMALL_CODE_BYTES:
            return None
        try:
            return SmallCode(digest=code.digest, archive=archive_path(self._folder.code, code.digest).read_bytes())
        except OSError:
            return None  # the agent downloads it, and reports why it cannot

    async def _remove(self, node_id: NodeId, within_s: float = 0.0) -> None:
        """Remove a node; if its host is not connected within some time, as soon as it is again."""
        gone = self._removed.setdefault(node_id, asyncio.Event())
        if self._meshes is not None:
            self._meshes.forget(node_id)
        link = self._links.get(self._machines.machine(node_id))
        if link is None:
            self._forget(node_id)
            return
        link.send(RemoveNode(node=node_id.node, generation=node_id.generation))
        try:
            async with asyncio.timeout(REMOVE_TIMEOUT_S if link.ready else within_s):
                await gone.wait()
        except TimeoutError:
            pass

    def _forget(self, node_id: NodeId) -> None:
        """The node has no processes any more."""
        (self._folder.node_dir(node_id.node, node_id.generation) / "token").unlink(missing_ok=True)
        if waiting := self._removed.pop(node_id, None):
            waiting.set()

    def _on_message(self, host: str, message: FromHost, data: bytes) -> None:
        match message:
            case HostReady():
                self._on_ready(host, message)
            case HostReserved():
                if self._reservation.answer(host, kept=True):
                    self._place()
            case HostBusy(reason=reason):
                if self._reservation.answer(host, kept=False):
                    self._use_others(host, reason)
            case NodePrepared(mesh=mesh, order=order):
                if self._meshes is not None:
                    placement = AgentPlacement(order=order, host=mesh, tunnel=self._tunnel(host, mesh))
                    self._meshes.place(message.node_id, placement)
            case NodeRunning():
                self._created_mark(message.node_id).touch()
                self._report(message.node_id, BackendNodeState.CREATED, machine=host)
            case NodeEnded(reason=reason):
                self._end(message.node_id, reason)
            case NodeRemoved():
                self._forget(message.node_id)
                self._place()
            case NodeNotStarted(reason=reason):
                self._on_refusal(host, message.node_id, reason)
            case FileChunk(name=name, at=at):
                write_at(self._folder.path / name, at, data)
            case EndAnnounced():
                self._on_end_announced(host)
            case RunEnded():
                pass

    def _on_end_announced(self, host: str) -> None:  # noqa: B027 - nothing lends the hosts that ssh reaches
        """Take note that a host is about to be taken back."""

    def _on_ready(self, host: str, found: HostReady) -> None:
        """Bring the host to what it should have: it may have been restarted, or was out of reach."""
        link, here, known = self._links[host], set(self._nodes_on(host)), set(self._existing())
        # Hosts that share a folder find each other's nodes in it: this one would report them removed too early.
        found_here = (NodeId(node=node, generation=number) for node, number in found.nodes)
        there = {node_id for node_id in found_here if self._machines.machine(node_id) in (host, "")}
        ending = there if self._cancelled else set[NodeId]()  # before their files are deleted
        unwanted = ending | {node_id for node_id in there if node_id in self._removed or node_id not in known}
        for node_id in unwanted:
            link.send(RemoveNode(node=node_id.node, generation=node_id.generation))
        for node_id in here - there:
            if node_id in self._removed:
                self._forget(node_id)
            elif self._created_mark(node_id).exists():
                self._end(node_id, f"{host} has no process of it: it was restarted")
            else:  # the message that starts it was lost, with the connection or with an earlier controller
                self._send_start(node_id, host)
        if self._nodes_removed:
            link.send(EndRun())
        self._place()

    def _created_mark(self, node_id: NodeId) -> Path:
        """The file that says, to a later controller too, that a node's agent has run."""
        return self._folder.node_dir(node_id.node, node_id.generation) / CREATED_NAME

    def _end(self, node_id: NodeId, reason: str) -> None:
        """Report the end of a node's agent, once: Monarch may report it, too."""
        if node_id not in self._ended:
            self._ended.add(node_id)
            self._report(node_id, BackendNodeState.TERMINATED, self._fenced.pop(node_id, reason))

    def _make_meshes(self, address: str, port: int) -> LinkedMeshes | None:
        """What has Monarch start the agents; None if hosts start them themselves."""
        if self._job.orchestrator is not Orchestrator.MONARCH:
            return None
        from holdfast.launch.monarch.linked_meshes import LinkedMeshes

        return LinkedMeshes(
            self._folder, address, port, on_placed=self._on_placed, on_end=self._fence, on_lost=self._on_client_lost
        )

    async def _on_placed(self, node_id: NodeId, *, refusal: str) -> None:
        """Watch an agent that Monarch has started, or use another host for some time."""
        if not self._is_wanted(node_id):
            return
        host = self._machines.machine(node_id)
        if not refusal:
            self._created_mark(node_id).touch()
            self._links[host].send(WatchNode(node=node_id.node, generation=node_id.generation))
            return
        await self._remove(node_id)
        if node_id in self._removed:  # the host is out of reach, and may have started it
            self._end(node_id, refusal)
        else:
            self._on_refusal(host, node_id, refusal)

    async def _fence(self, node_id: NodeId, why: str) -> None:
        """Remove a node of which Monarch says that it has ended, then report its end."""
        if self._is_wanted(node_id) and node_id not in self._ended:
            self._fenced[node_id] = why
            await self._remove(node_id)
            self._end(node_id, why)

    def _is_wanted(self, node_id: NodeId) -> bool:
        return not self._cancelled and node_id not in self._removed and node_id in self._existing()

    async def _on_client_lost(self, lost: Finding) -> None:
        """Have all nodes start again: nothing watches Monarch's processes on their hosts any more."""
        self._observed.put_nowait(lost)
        started = [node_id for node_id in self._existing() if self._created_mark(node_id).exists()]
        await asyncio.gather(*(self._fence(node_id, lost.what) for node_id in started))

    def _on_refusal(self, host: str, node_id: NodeId, reason: str) -> None:
        """Start a node on another host than this one, unless a newer generation waits."""
        self._forget(node_id)
        if node_id.generation >= self._pending.get(node_id.node, node_id).generation:
            self._pending[node_id.node] = node_id
        self._use_others(host, reason)

    def _use_others(self, host: str, reason: str) -> None:
        """Place nothing on a host for some time."""
        self._refused[host] = reason
        asyncio.get_running_loop().call_later(BUSY_RETRY_S, self._try_again, host)
        self._place()

    def _try_again(self, host: str) -> None:
        self._refused.pop(host, None)
        self._place()

    def _report(self, node_id: NodeId, state: BackendNodeState, reason: str = "", *, machine: str = "") -> None:
        self._observed.put_nowait(NodeObservation(node_id=node_id, state=state, reason=reason, machine=machine))
