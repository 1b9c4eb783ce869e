"""Agent: carries out the controller's orders on one node and survives a controller restart.

It acts on its own in one case only: on SIGTERM, or when the controller has been gone too long, it drains. The ranks
save a checkpoint, then the agent stops them and exits. This file is long because it lists every order the agent
handles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections import defaultdict
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from holdfast.agent.code_cache import CodeCache
from holdfast.agent.controller_connection import ControllerConnection, TokenRejected
from holdfast.agent.echo import Echo
from holdfast.agent.failure_evidence import FailedRanks, keep_evidence
from holdfast.agent.fault_injection import FaultInjector, InjectionContext
from holdfast.agent.log_replica import LogReplica
from holdfast.agent.log_retention import LogRetention
from holdfast.agent.node_check import NodeCheck
from holdfast.agent.node_monitors import NodeMonitors, WatchedNode
from holdfast.agent.node_probe import NodeProbe
from holdfast.agent.node_replay import NodeReplay
from holdfast.agent.prewarm import PrewarmPool
from holdfast.agent.quorum_relay import QuorumRelay
from holdfast.agent.rendezvous_port import ReservedPort
from holdfast.agent.sources import Sources
from holdfast.agent.standby_preparation import prepare_standby
from holdfast.agent.state_memory import StateMemory
from holdfast.agent.tcp_store_host import TcpStoreHost
from holdfast.agent.traces import trace_url, upload_trace
from holdfast.agent.worker_group import WorkerGroup
from holdfast.clock import JUMP_POLL_S, Clock, clock_jumped
from holdfast.errors import HoldfastError
from holdfast.events import (
    AgentConnected,
    CodeFetched,
    EvidenceKept,
    FindingRaised,
    NodePreemptionNotice,
    RanksPrewarmed,
    RanksStopped,
    StandbyReady,
)
from holdfast.findings import Finding
from holdfast.host.processes import adopt_orphans, descendants, kill_all
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.protocol import orders, rank_messages
from holdfast.protocol.rank_messages import CheckpointAndExitNow, TakeCheckpointNow, TransferAndExitNow
from holdfast.run_dir import EXIT_REASON_NAME, read_controller_record

log = logging.getLogger("holdfast.agent")

STDOUT = 1

LOST_CONTROLLER_GRACE_S = 30.0
"""Grace for ranks, in seconds, once the agent stops waiting for a controller."""

PREWARM_TIMEOUT_S = 60.0
"""Longest that a code update waits for imports to finish, in seconds, while ranks are running."""

ECHO_DRAIN_TIMEOUT_S = 2.0
"""Longest to wait, in seconds, until the rest of the ranks' output is on standard output."""

EVIDENCE_TIMEOUT_S = 5.0
"""Longest that the agent stays, in seconds, to write the evidence of the failure with which the run ends."""

SAME_SIGTERM_S = 1.0
"""SIGTERMs within this many seconds are one: a scheduler signals every process, and some pass theirs on."""

DRAIN_MARGIN_S = 5.0
"""Seconds after the grace within which killed ranks must be gone."""


class AgentSettings(Struct, frozen=True, kw_only=True):
    """Start parameters of an agent."""

    node: int
    generation: int
    controller: str
    """The controller's URL when this agent was started."""
    token: str
    ca: Path | None
    folder: Path
    sockets: Path
    code: Path
    address: str
    controller_grace_s: float
    node_grace_s: float
    stop_grace_s: float
    controller_record: Path | None = None
    """The run's `controller.json`, if this node can read it: a restarted controller may use another port."""
    log_replica: Path | None = None
    """Folder for replicas of the event log and code, if the controller may lose them with its machine."""
    echo: bool = False
    """Whether the agent also copies the ranks' output to standard output."""

    def controller_url(self) -> str:
        """The controller's URL, as last known."""
        found = read_controller_record(self.controller_record) if self.controller_record else {}
        if not {"host", "port"} <= found.keys():
            return self.controller
        address = f"{found['host']}:{found['port']}"
        return urlsplit(self.controller)._replace(netloc=address).geturl()


class Agent:
    """One node's agent."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._incarnation = secrets.token_hex(4)
        self._source = f"node{settings.node}.{settings.generation}/{self._incarnation}"
        self._clock = Clock()
        self._rendezvous_port = ReservedPort(settings.address)
        self._code_cache = CodeCache(
            settings.controller_url, settings.token, settings.code, ca=settings.ca, log_replica=settings.log_replica
        )
        self._quorum_relay = QuorumRelay(settings.controller_url, settings.token, settings.ca)
        self._log_replica = LogReplica(settings.log_replica) if settings.log_replica else None
        self._log_retention = LogRetention(self._report_finding)
        self._echo = Echo(STDOUT) if settings.echo else None
        self._prewarm_pool = PrewarmPool(settings.folder, self._report_finding, self._on_prewarmed)
        self._node_check = NodeCheck(
            node=settings.node,
            generation=settings.generation,
            address=settings.address,
            clock=self._clock,
            send=self._send,
        )
        self._node_probe = NodeProbe(
            node=settings.node,
            generation=settings.generation,
            folder=settings.folder,
            rendezvous_port=self._rendezvous_port,
            clock=self._clock,
            send=self._send,
        )
        self._node_replay = NodeReplay(
            node=settings.node,
            generation=settings.generation,
            folder=settings.folder,
            rendezvous_port=self._rendezvous_port,
            get_code=self._code_cache.get,
            clock=self._clock,
            send=self._send,
        )
        self._monitors = NodeMonitors(
            WatchedNode(node=settings.node, generation=settings.generation, address=settings.address),
            self._clock,
            self._send,
            on_memory_pressure=lambda: self._prewarm_pool.disable("memory was short"),
        )
        self._state_memory = StateMemory()
        self._store_host = TcpStoreHost()
        self._sources: defaultdict[int, Sources] = defaultdict(Sources)
        """Keyed by replica."""
        self._worker_groups: dict[int, WorkerGroup] = {}
        self._latest_attempts: dict[int, int] = {}
        """Highest attempt started or stopped, by replica; an order for an earlier attempt is stale."""
        self._start_tasks: dict[int, asyncio.Task[None]] = {}
        self._fetch_tasks: set[asyncio.Task[None]] = set()
        """Downloads of code for a later start."""
        self._evidence_tasks: set[asyncio.Task[None]] = set()
        """Evidence of failures that is being written."""
        self._standby_task: asyncio.Task[None] | None = None
        self._group_stopped = asyncio.Event()
        self._drain_task: asyncio.Task[None] | None = None
        """Runs before the agent exits; once it is set, the agent starts nothing."""
        self._sigterm_at = float("-inf")
        """When the latest SIGTERM that counts came, on the event loop's clock."""
        self._exiting = asyncio.Event()
        self._shutdown_ordered = False
        """Whether the controller has ordered this agent to shut down."""
        self._controller = ControllerConnection(
            settings.controller_url,
            settings.token,
            self._source,
            hello=self._hello,
            handle_order=self._handle_order,
            heartbeat_timeouts=HeartbeatTimeouts(node_grace_s=settings.node_grace_s),
            ca=settings.ca,
            upload_log_replica=self._upload_log_replica if settings.log_replica else None,
        )
        self._fault_injector = FaultInjector(
            InjectionContext(
                node=settings.node,
                worker_groups=self._worker_groups.values,
                controller=self._controller,
                clock=self._clock,
                monitors=self._monitors,
            )
        )

    async def run(self) -> bool:
        """Run until shutdown or controller timeout; return whether the controller ordered the shutdown."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_sigterm)
        link = asyncio.ensure_future(self._controller.run())
        link.add_done_callback(self._on_connection_failed)
        work = (
            self._exit_on_controller_timeout(),
            self._watch_clock(),
            self._log_retention.run(),
            *([self._echo.run()] if self._echo else []),
        )
        watches = [asyncio.ensure_future(each) for each in work]
        await self._exiting.wait()
        for watch in watches:
            watch.cancel()
        self._monitors.stop()
        for group in list(self._worker_groups.values()):
            group.stop(0.0)
        link.cancel()
        for group in list(self._worker_groups.values()):
            group.kill_orphans()
        if self._evidence_tasks:
            await asyncio.wait(self._evidence_tasks, timeout=EVIDENCE_TIMEOUT_S)
        await self._store_host.stop()  # kill_all would reap it, of which asyncio warns
        kill_all(lambda: descendants(os.getpid()), within_s=DRAIN_MARGIN_S)
        if self._echo is not None:
            await self._echo.finish(ECHO_DRAIN_TIMEOUT_S)
        return self._shutdown_ordered

    def _on_connection_failed(self, connection: asyncio.Future[None]) -> None:
        if connection.cancelled():
            return
        if isinstance(error := connection.exception(), TokenRejected):
            log.error("the controller refused this agent's token")
        else:
            log.error("the connection to the controller failed for good", exc_info=error)
        self._exiting.set()

    async def _exit_on_controller_timeout(self) -> None:
        """Exit when no controller has connected within the grace: unsupervised ranks occupy a node for nothing."""
        grace_s = self._settings.controller_grace_s
        while True:
            await self._controller.disconnected.wait()
            try:
                await asyncio.wait_for(self._controller.connected.wait(), grace_s)
                self._controller.disconnected.clear()
            except TimeoutError:
                reason = f"its agent left after {grace_s:g} s without a controller (recovery.controller_grace_s)"
                self._drain_task = asyncio.ensure_future(self._drain(reason, LOST_CONTROLLER_GRACE_S))
                return

    def _on_sigterm(self) -> None:
        """The node is being preempted: notify the controller and drain; on a second signal, exit immediately."""
        now = asyncio.get_running_loop().time()
        if now - self._sigterm_at < SAME_SIGTERM_S:
            return
        self._sigterm_at = now
        if self._drain_task is not None:
            self._exiting.set()
            return
        grace_s = self._settings.stop_grace_s
        self._controller.send(NodePreemptionNotice(at=self._clock(), node=self._settings.node, grace_s=grace_s))
        self._drain_task = asyncio.ensure_future(self._drain("its agent received SIGTERM", grace_s))

    async def _drain(self, reason: str, grace_s: float) -> None:
        """Request a checkpoint from the ranks, stop them after the grace, then exit."""
        log.error("%s; requested a checkpoint from the ranks first", reason)
        with contextlib.suppress(OSError):
            (self._settings.folder / EXIT_REASON_NAME).write_text(reason)
        for group in list(self._worker_groups.values()):
            group.drain(grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s + DRAIN_MARGIN_S):
                while self._worker_groups:
                    self._group_stopped.clear()
                    await self._group_stopped.wait()
        if self._controller.connected.is_set():
            await self._controller.flush(within_s=DRAIN_MARGIN_S)
        self._exiting.set()

    async def _watch_clock(self) -> None:
        """Report changes of the wall clock, which the agent does not use."""
        while True:
            await asyncio.sleep(JUMP_POLL_S)
            if jump_s := self._clock.jumped_s():
                found = clock_jumped(f"node{self._settings.node}", jump_s)
                self._controller.send(FindingRaised(at=self._clock(), finding=found))

    def _hello(self) -> AgentConnected:
        groups = list(self._worker_groups.values())
        return AgentConnected(
            at=self._clock(),
            source=self._source,
            node=self._settings.node,
            generation=self._settings.generation,
            incarnation=self._incarnation,
            hostname=socket.gethostname(),
            address=self._settings.address,
            port=self._rendezvous_port.number,
            pid=os.getpid(),
            attempt=max(self._latest_attempts.values(), default=-1),
            clock=self._clock.sample,
            protocol=orders.PROTOCOL,
            oldest_protocol=orders.OLDEST_PROTOCOL,
            log_replica=self._log_replica.position if self._log_replica else None,
            running=tuple(state for group in groups for state in group.running),
        )

    async def _upload_log_replica(self) -> None:
        if self._log_replica is not None:
            await self._log_replica.upload(self._settings.controller_url(), self._settings.token, self._settings.ca)

    async def _upload_trace(self, name: str, file: Path) -> str:
        url = trace_url(self._settings.controller_url(), name)
        return await upload_trace(url, file, token=self._settings.token, ca=self._settings.ca)

    # Orders

    def _handle_order(self, order: orders.AnyOrder) -> None:
        match order:
            case orders.StartRanks():
                self._start_ranks(order)
            case orders.PrepareStandby(start=start):
                if self._standby_task is None or self._standby_task.done():
                    self._standby_task = asyncio.ensure_future(self._prepare_standby(start))
            case orders.CheckNode():
                self._node_check.request(order)
            case orders.ProbeNode():
                self._node_probe.request(order)
            case orders.StopProbe():
                self._node_probe.stop(order)
            case orders.ReplayNode():
                self._node_replay.request(order)
            case orders.StopReplay():
                self._node_replay.stop(order)
            case orders.StopRanks():
                self._stop_ranks(order)
            case orders.InjectFault():
                self._fault_injector.schedule(order)
            case orders.TakeCheckpoint():
                for group in self._worker_groups.values():
                    group.send_to_sessions(TakeCheckpointNow(), "can take a checkpoint")
            case orders.ProfileSteps():
                for group in self._worker_groups.values():
                    group.profile_steps(order)
            case orders.DumpStacks():
                for group in self._worker_groups.values():
                    group.dump_stacks(order)
            case orders.ReadMonitors():
                self._send(orders.NodeReadings(node=self._settings.node, values=self._monitors.values()))
            case orders.CheckpointAndExit():
                for group in self._worker_groups.values():
                    group.send_to_ranks(
                        TransferAndExitNow() if order.transfer_state else CheckpointAndExitNow(reason=order.reason)
                    )
            case orders.FetchCode():
                self._fetch_code(order.digest)
            case orders.FreeState():
                self._state_memory.free(order.replica)
            case orders.ReportSilentRanks():
                group = self._worker_groups.get(order.replica)
                if group is not None and group.attempt == order.attempt:
                    group.report_silent(all_ranks=order.all_ranks)
            case orders.AnnounceReplicaDown() | orders.AnnounceReplicaStarting():
                self._forward_to_other_replicas(order)
            case orders.ReplicateLog():
                if self._log_replica is not None:
                    self._log_replica.apply(order)
            case orders.Shutdown():
                self._shutdown_ordered = True
                self._exiting.set()
            case _:
                log.warning("an order this agent does not know: %s", order)

    def _forward_to_other_replicas(self, order: orders.AnnounceReplicaDown | orders.AnnounceReplicaStarting) -> None:
        """Forward the state change of one replica to the ranks of the others."""
        kind = (
            rank_messages.ReplicaDown
            if isinstance(order, orders.AnnounceReplicaDown)
            else rank_messages.ReplicaStarting
        )
        for group in self._worker_groups.values():
            if group.replica != order.replica:
                group.send_to_ranks(kind(replica=order.replica, attempt=order.attempt))

    def _fetch_code(self, digest: str) -> None:
        """Download code ahead of its use, while ranks are running."""
        fetch = asyncio.ensure_future(self._fetch_and_prewarm(digest))
        self._fetch_tasks.add(fetch)
        fetch.add_done_callback(self._fetch_tasks.discard)

    async def _fetch_and_prewarm(self, digest: str) -> None:
        """Download code, prewarm the ranks' programs with it, and report both."""
        problem = None
        try:
            code = await self._code_cache.get(digest)
            async with asyncio.timeout(PREWARM_TIMEOUT_S):
                await asyncio.gather(*(group.prewarm(code) for group in self._worker_groups.values()))
                await self._prewarm_pool.prewarm_standby(code)
        except HoldfastError as error:
            problem = error.findings[0]
        except TimeoutError:
            log.warning("the imports of other code take more than %g s; its ranks will start cold", PREWARM_TIMEOUT_S)
        self._controller.send(CodeFetched(at=self._clock(), node=self._settings.node, digest=digest, failure=problem))

    def _start_ranks(self, order: orders.StartRanks) -> None:
        if order.attempt <= self._latest_attempts.get(order.replica, -1) or self._drain_task is not None:
            return
        order = self._quorum_relay.with_address(order)
        self._latest_attempts[order.replica] = order.attempt
        self._fault_injector.forget_pending()
        self._monitors.start(devices=order.watch_devices)
        self._prewarm_pool.assign_standby(order.replica)
        group = WorkerGroup(
            order,
            node=self._settings.node,
            sockets=self._settings.sockets,
            folder=self._settings.folder,
            rendezvous_port=self._rendezvous_port,
            clock=self._clock,
            get_code=self._code_cache.get,
            log_retention=self._log_retention,
            echo=self._echo,
            prewarm_pool=self._prewarm_pool,
            state_memory=self._state_memory,
            store_host=self._store_host,
            sources=self._sources[order.replica],
            send=self._send,
            on_step=self._fault_injector.on_step,
            on_stopped=self._on_group_stopped,
            on_failed=self._keep_evidence,
            upload_trace=self._upload_trace,
        )
        self._worker_groups[order.replica] = group
        start = asyncio.ensure_future(group.start())
        start.add_done_callback(self._on_start_done)
        self._start_tasks[order.replica] = start

    async def _prepare_standby(self, start: orders.StartRanks) -> None:
        node, generation = self._settings.node, self._settings.generation
        self._monitors.start(devices=start.watch_devices)
        ready = await prepare_standby(
            start,
            node=node,
            get_code=self._code_cache.get,
            prewarm_pool=self._prewarm_pool,
            clock=self._clock,
            report_finding=self._report_finding,
            cancelled=self._exiting,
        )
        if ready and self._drain_task is None:
            self._controller.send(StandbyReady(at=self._clock(), node=node, generation=generation))

    def _on_start_done(self, start: asyncio.Future[None]) -> None:
        """Exit if a start fails halfway: losing the node is a state that the controller can recover from."""
        if not start.cancelled() and (error := start.exception()) is not None:
            log.critical("the ranks could not be started", exc_info=error)
            self._exiting.set()

    def _stop_ranks(self, order: orders.StopRanks) -> None:
        known = self._latest_attempts.get(order.replica, -1)
        group = self._worker_groups.get(order.replica)
        if group is not None and group.attempt <= order.attempt:
            group.stop(order.grace_s, together=order.all_replicas)
        elif order.attempt > known:
            # The order to start this attempt never arrived and must not take effect later. Other nodes may have used
            # this port.
            self._latest_attempts[order.replica] = order.attempt
            self._rendezvous_port.renew()
            self._controller.send(
                RanksStopped(
                    at=self._clock(),
                    node=self._settings.node,
                    replica=order.replica,
                    attempt=order.attempt,
                    port=self._rendezvous_port.number,
                )
            )

    def _send(self, message: orders.AgentMessage) -> int:
        """Send a message, except `RanksStopped` while draining: the controller would start ranks here again."""
        draining = self._drain_task is not None and isinstance(message, RanksStopped)
        return 0 if draining else self._controller.send(message)

    def _report_finding(self, finding: Finding) -> None:
        self._controller.send(FindingRaised(at=self._clock(), finding=finding))

    def _on_prewarmed(self, replica: int, ranks: tuple[int, ...]) -> None:
        self._controller.send(RanksPrewarmed(at=self._clock(), node=self._settings.node, replica=replica, ranks=ranks))

    def _keep_evidence(self, ranks: FailedRanks) -> None:
        """Keep the evidence of a failure in a thread, while the next attempt may already start."""
        task = asyncio.ensure_future(self._keep_and_report(ranks))
        self._evidence_tasks.add(task)
        task.add_done_callback(self._evidence_tasks.discard)

    async def _keep_and_report(self, ranks: FailedRanks) -> None:
        try:
            kept = await asyncio.to_thread(keep_evidence, ranks, self._monitors.latest())
        except OSError as error:
            log.warning("the evidence of attempt %d cannot be kept: %s", ranks.attempt, error)
            return
        self._controller.send(
            EvidenceKept(
                at=self._clock(),
                node=self._settings.node,
                replica=ranks.replica,
                attempt=ranks.attempt,
                folder=str(kept.folder),
                files=kept.files,
                bytes=kept.bytes,
                left_out=kept.left_out,
            )
        )

    def _on_group_stopped(self, group: WorkerGroup) -> None:
        if self._worker_groups.get(group.replica) is group:
            del self._worker_groups[group.replica]
        self._group_stopped.set()
