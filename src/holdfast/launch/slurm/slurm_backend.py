"""Runs nodes in a Slurm allocation: asks for it, takes the connections of its nodes, and asks again when it ends.

allocation_backend.py has what differs for a controller that is in the allocation itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from urllib.parse import urlsplit

import msgspec

from holdfast.errors import HoldfastError
from holdfast.findings import Finding
from holdfast.host.files import atomic_write, read_line
from holdfast.job.backend import NodeId
from holdfast.job.quarantine import Certainty, MachineEvidence
from holdfast.job.quarantine_text import cordoned, not_cordoned
from holdfast.job.run_spec import RunSpec
from holdfast.launch.hosts.host_messages import FileChunk, HostReady, RunEnded, ToHost, decode_from_host, encode
from holdfast.launch.hosts.linked_hosts import END_TIMEOUT_S, LinkedHosts
from holdfast.launch.local.run_network import RunNetwork
from holdfast.launch.slurm import slurm_commands
from holdfast.launch.slurm.batch_script import Meeting, batch_script
from holdfast.launch.slurm.slurm_commands import SlurmJob
from holdfast.launch.slurm.slurm_node import notice_loss
from holdfast.launch.target import OrderNodes
from holdfast.run_dir import RunDir
from holdfast.security.tls import server_context
from holdfast.security.tokens import TokenIssuer

log = logging.getLogger("holdfast.controller")

POLL_S = 1.0
SETTLE_S = 5.0
"""Time for the other nodes of an allocation to connect after the first, before nodes are placed."""
NEW_ALLOCATION_S = 20.0
"""Time for which a node waits for one of its allocation's before the run asks for another allocation."""
RECONNECT_S = 5.0
"""Longest wait for nodes whose connection was lost, when the run ends."""
JOB_NAME = "allocation"
"""File in the run's folder with the number of its Slurm job."""
PORT_NAME = "allocation.port"
"""File with the port to which nodes connect, for a later controller."""
ENDING_NAME = "allocation.ending"
"""File with the number of the Slurm job whose end was announced last, for a later controller."""
LINE_LIMIT = 1 << 20


class _Join(msgspec.Struct, frozen=True):
    """The first line of a node's connection."""

    key: str
    name: str
    order: int
    switches: str = ""
    """Names of the switches above the node, from the top, separated by dots; empty without a topology plugin."""


class NodeLink:
    """The connection of one node of the allocation, made by the node."""

    def __init__(self) -> None:
        self.ready: HostReady | None = None
        self.problem = ""
        self.output: asyncio.StreamWriter | None = None

    def send(self, message: ToHost) -> None:
        """Send a message, if the node is connected."""
        if self.output is not None:
            self.output.write(encode(message))

    def close(self) -> None:
        """Let the connection end."""
        if self.output is not None:
            self.output.close()


class SlurmBackend(LinkedHosts):
    """One allocation at a time, with all nodes of the run and its spares."""

    def __init__(
        self, *, folder: RunDir, accepted: RunSpec, networks: RunNetwork, url: str, order_nodes: OrderNodes
    ) -> None:
        where = urlsplit(url)
        super().__init__(folder, accepted, (), monarch_at=(where.hostname or "", 0))
        self._order_nodes = order_nodes
        self._controller = where.hostname or "", where.port or 0
        self._nodes: dict[str, NodeLink] = {}
        self._order: dict[str, tuple[str, int]] = {}
        """By node: its switches, and its number in the allocation."""
        self._slurm_job: SlurmJob | None = None
        self._joined = asyncio.Event()
        """Set whenever a node has connected."""
        self._serving: set[asyncio.Task[None]] = set()
        """One for each connection of a node."""
        self._trouble = ""
        """What Slurm said when a command failed."""
        self._settled_at = float("inf")
        """When nodes are placed, though not all of the allocation are connected."""
        self._waiting_since = float("inf")
        """Since when a node of the run waits for one of the allocation."""

    async def avoid_machine(
        self, node_id: NodeId, machine: str, evidence: MachineEvidence | None
    ) -> tuple[Finding, ...]:
        """Use another node of the allocation, and drain this one for all jobs if a device surely failed."""
        findings = await super().avoid_machine(node_id, machine, evidence)
        quarantined = any(each.code == "machine-quarantined" for each in findings)
        if quarantined and evidence is not None and evidence.certainty is Certainty.CERTAIN:
            return (*findings, await asyncio.to_thread(self._drain, machine, evidence.finding.what))
        return findings

    def _drain(self, machine: str, why: str) -> Finding:
        try:
            slurm_commands.drain(machine, f"{self._folder.run_id}: {why}")
        except HoldfastError as refused:
            remedy = f"Have it drained (`scontrol update nodename={machine} state=drain`) and repaired."
            return not_cordoned(machine, refused.findings[0].evidence, remedy)
        return cordoned(machine, self._accepted.target)

    def _others_compete(self) -> bool:
        return False

    def _connect(self) -> None:
        if not self._running:
            self._running = [asyncio.ensure_future(self._keep_allocation())]

    def _may_place(self) -> bool:
        if self._is_ending():
            return False
        there = sum(link.ready is not None for link in self._nodes.values())
        return there > 0 and (there >= self._wanted() or time.monotonic() >= self._settled_at)

    def _address(self, host: str) -> str:
        return ""

    def _wanted(self) -> int:
        """Nodes to wait for: those of the allocation, which may have fewer than the run asked for."""
        most = self._job.node_slots + self._accepted.slurm.spares
        job = self._slurm_job
        return min(most, job.nodes) if job is not None and job.state == "RUNNING" and job.nodes else most

    def _why_waiting(self) -> str:
        job, number = self._slurm_job, self._number()
        if self._trouble or job is None:
            return self._trouble
        if self._is_ending():
            return f"Slurm ends job {number} soon; the run then continues in another"
        if job.state != "RUNNING":
            return f"Slurm job {number} is {job.explain()}"
        if not self._may_place():
            return f"Slurm job {number} has nodes, which are starting"
        return f"no node of Slurm job {number} is free. {super()._why_waiting()}"

    def _number(self) -> str:
        return self._recorded(JOB_NAME)

    def _recorded(self, name: str) -> str:
        try:
            return read_line(self._folder.path / name)
        except OSError:
            return ""

    def _is_ending(self) -> bool:
        """Whether Slurm has announced the end of the allocation."""
        number = self._number()
        return bool(number) and self._recorded(ENDING_NAME) == number

    def _on_end_announced(self, host: str) -> None:
        """Start no more nodes in this allocation."""
        if not self._is_ending():
            log.info("the end of Slurm job %s was announced to %s", self._number(), host)
            atomic_write(self._folder.path / ENDING_NAME, self._number().encode())

    async def _keep_allocation(self) -> None:
        """Take connections, and have an allocation while nodes wait for one."""
        server = await self._listen()
        port = server.sockets[0].getsockname()[1]
        atomic_write(self._folder.path / PORT_NAME, str(port).encode())
        async with server:
            while True:
                try:
                    await self._look(port)
                    self._trouble = ""
                except HoldfastError as error:
                    said = error.findings[0]
                    self._trouble = ": ".join((said.what, *said.evidence))
                    log.warning("%s", self._trouble)
                self._place()
                await asyncio.sleep(POLL_S)

    async def _look(self, port: int) -> None:
        """Compare the allocation with what the run needs."""
        number = self._number()
        self._slurm_job = await asyncio.to_thread(slurm_commands.show, number) if number else None
        if number and (self._slurm_job is None or not self._slurm_job.is_live):
            self._on_job_end(number)
            number = ""
        if self._cancelled:
            return
        if not number and self._pending:
            await self._submit_job(port)
        job = self._slurm_job
        if job is not None and job.state == "RUNNING" and self._is_ending() and not self._existing():
            log.info("Slurm job %s ends soon, and no node uses it; it is given back for another", number)
            await asyncio.to_thread(self._give_back, number)
            return
        waits = bool(self._pending) and self._may_place()
        self._waiting_since = min(self._waiting_since, time.monotonic()) if waits else float("inf")
        if time.monotonic() - self._waiting_since > NEW_ALLOCATION_S and not self._job.nodes.is_elastic:
            log.warning("Slurm job %s has too few nodes left; it is given back for another", number)
            self._waiting_since = float("inf")
            await asyncio.to_thread(self._give_back, number)

    def _give_back(self, number: str) -> None:
        """End a job, so that the run gets another; raises HoldfastError if Slurm does not answer."""
        slurm_commands.cancel(number)

    def _end_job(self, number: str) -> None:
        """End the run's last job; raises HoldfastError if Slurm does not answer."""
        slurm_commands.cancel(number)

    async def _submit_job(self, port: int) -> None:
        meeting = Meeting(
            address=self._controller[0],
            port=str(port),
            key=TokenIssuer(read_line(self._folder.token)).host_key(),
            ca=self._folder.ca.read_text(),
        )
        script = batch_script(self._accepted, self._folder.run_id, meeting, self._machines.out_of_use)
        number = await asyncio.to_thread(slurm_commands.submit, script)
        atomic_write(self._folder.path / JOB_NAME, number.encode())
        log.info("submitted Slurm job %s", number)

    def _on_job_end(self, number: str) -> None:
        """Nothing of a job that has ended runs any more."""
        state = self._slurm_job.state if self._slurm_job else "gone"
        (self._folder.path / JOB_NAME).unlink(missing_ok=True)
        self._slurm_job, self._settled_at = None, float("inf")
        for link in self._nodes.values():
            link.close()
        self._nodes.clear()
        self._links.clear()
        self._order.clear()
        self._machines.names = ()
        for node_id in self._existing():
            self._forget(node_id)
            self._end(node_id, f"its Slurm job {number} has ended ({state})")

    async def _listen(self) -> asyncio.Server:
        tls = server_context(self._folder.identity)
        try:
            port = int(read_line(self._folder.path / PORT_NAME))
        except (OSError, ValueError):
            port = 0
        try:
            return await asyncio.start_server(
                self._on_node, self._controller[0], port, ssl=tls, limit=LINE_LIMIT, reuse_address=True
            )
        except OSError:
            if not port:
                raise
            return await asyncio.start_server(self._on_node, self._controller[0], 0, ssl=tls, limit=LINE_LIMIT)

    def _on_node(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.ensure_future(self._serve_node(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve_node(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection of a node until it ends."""
        notice_loss(writer)
        try:
            join = msgspec.json.decode(await reader.readline(), type=_Join)
        except (OSError, ValueError, msgspec.DecodeError):
            writer.close()
            return
        expected = TokenIssuer(read_line(self._folder.token)).host_key()
        if not hmac.compare_digest(join.key.encode(), expected.encode()):
            log.warning("a node without this run's key was refused")
            writer.close()
            return
        link = self._nodes.setdefault(join.name, NodeLink())
        link.close()  # of a connection that the node has given up
        self._links[join.name], self._order[join.name] = link, (join.switches, join.order)
        known = sorted(self._order.items(), key=lambda node: node[1])
        self._machines.names = self._order_nodes(self._job, {name: switches for name, (switches, _) in known})
        link.output = writer
        writer.write(encode(self._setup(join.name, *self._controller, exclusive=False)))
        try:
            while line := await reader.readline():
                message = decode_from_host(line)
                data = await reader.readexactly(message.bytes) if isinstance(message, FileChunk) else b""
                if isinstance(message, HostReady):
                    link.ready, link.problem = message, ""
                    self._joined.set()
                    self._settled_at = min(self._settled_at, time.monotonic() + SETTLE_S)
                self._on_message(join.name, message, data)
                if isinstance(message, RunEnded):
                    break
        except (OSError, ValueError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            log.warning("the connection of %s failed: %s", join.name, error)
        finally:
            if link.output is writer:
                link.ready, link.output, link.problem = None, None, "its connection has ended"
            writer.close()

    async def _before_cancel(self) -> None:
        """Wait for nodes that are about to connect; others end with the allocation."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT_S if self._nodes else END_TIMEOUT_S):
                while self._number() and any(self._is_absent(node_id) for node_id in self._existing()):
                    self._joined.clear()
                    await self._joined.wait()
        for node_id in filter(self._is_absent, self._existing()):
            self._forget(node_id)

    def _is_absent(self, node_id: NodeId) -> bool:
        link = self._nodes.get(self._machines.machine(node_id))
        return link is None or link.ready is None

    async def _after_cancel(self) -> None:
        number = self._number()
        if self._serving:
            await asyncio.wait(self._serving, timeout=END_TIMEOUT_S)
        if number:
            try:
                await asyncio.to_thread(self._end_job, number)
            except HoldfastError as error:
                log.warning("Slurm job %s was not ended: %s", number, error)
        for node_id in self._existing():
            self._forget(node_id)
