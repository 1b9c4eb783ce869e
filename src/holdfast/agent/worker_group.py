"""Worker group: the ranks of one attempt on this node, which start, run and stop together.

It reports events through `send`. When no process of the attempt is left, it sends `RanksStopped` once, with a fresh
port for the next rendezvous. rank_reports.py handles what the ranks report, rank_stopper.py stops them.
The file is long because starting, watching and ending share one state.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path

from holdfast.agent.echo import Echo
from holdfast.agent.exit_watcher import ExitWatcher
from holdfast.agent.fabric_watch import FabricWatch
from holdfast.agent.failure_evidence import FailedRanks
from holdfast.agent.flight_dump import FlightRecorders
from holdfast.agent.hang_detector import HangDetector
from holdfast.agent.log_retention import LogRetention
from holdfast.agent.memory_watch import MemoryWatch
from holdfast.agent.orphans import OrphanProcesses
from holdfast.agent.prewarm import PrewarmPool, RankSlot
from holdfast.agent.rank_ipc import RankServer
from holdfast.agent.rank_preflight import RankPreflight
from holdfast.agent.rank_process import ForkFunction, ProcessExit, RankProcess
from holdfast.agent.rank_reports import RankReports
from holdfast.agent.rank_sockets import RankSockets, rank_channel_missing
from holdfast.agent.rank_stopper import RankStopper
from holdfast.agent.rendezvous_check import RendezvousCheck, no_rendezvous_finding
from holdfast.agent.rendezvous_port import ReservedPort
from holdfast.agent.socket_watch import SocketWatch
from holdfast.agent.sources import Sources
from holdfast.agent.stack_sampler import StackSampler
from holdfast.agent.state_memory import StateMemory
from holdfast.agent.step_aggregator import StepAggregator
from holdfast.agent.tcp_store_host import TcpStoreHost, hosts_store
from holdfast.agent.traces import RankTraces, Upload
from holdfast.agent.zygote import RankCommand
from holdfast.clock import Clock
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import (
    ExitReason,
    FindingRaised,
    RankExited,
    RanksStarted,
    RanksStopped,
    RankState,
)
from holdfast.findings import Finding, Severity, replica_suffix
from holdfast.protocol.orders import AgentMessage, DumpStacks, ProfileSteps, RankLaunch, StartRanks
from holdfast.protocol.rank_messages import (
    AgentToRank,
    CheckpointAndExitNow,
    InjectRankFault,
    TakeCheckpointNow,
)
from holdfast.protocol.rank_output import OutputSource

log = logging.getLogger("holdfast.agent")

PREWARM_AFTER_FIRST_STEP_S = 5.0
"""Seconds from an attempt's first step until zygotes for the next attempt start."""

PREWARM_AFTER_START_S = 30.0
"""The same from the start of ranks that report no steps."""

IPC_DRAIN_TIMEOUT_S = 0.25
"""Longest wait for the last messages of a rank that has exited; only a child that keeps its socket uses it up."""


class WorkerGroup:
    """The ranks of one replica on this node, in one attempt."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        sockets: Path,
        folder: Path,
        rendezvous_port: ReservedPort,
        clock: Clock,
        get_code: Callable[[str], Coroutine[None, None, Path]],
        log_retention: LogRetention,
        prewarm_pool: PrewarmPool,
        state_memory: StateMemory,
        store_host: TcpStoreHost,
        sources: Sources,
        send: Callable[[AgentMessage], int],
        on_step: Callable[[int, int], None],
        on_stopped: Callable[[WorkerGroup], None],
        on_failed: Callable[[FailedRanks], None],
        upload_trace: Upload,
        echo: Echo | None = None,
    ) -> None:
        self.replica = order.replica
        self.attempt = order.attempt
        self._order = order
        self._node = node
        self._folder = folder
        self._rendezvous_port = rendezvous_port
        self._clock = clock
        self._get_code = get_code
        self._code_task: asyncio.Task[Path] | None = None
        self._log_retention = log_retention
        self._echo = echo
        self._prewarm_pool = prewarm_pool
        self._state_memory = state_memory
        self._store_host = store_host
        self._sources = sources
        self._comparing: asyncio.Task[None] | None = None
        self._store_task: asyncio.Task[None] | None = None
        self._rendezvous_check: RendezvousCheck | None = None
        self._prewarm_timer: asyncio.TimerHandle | None = None
        self._commands: dict[RankSlot, RankCommand] = {}
        self._send = send
        self._on_stopped = on_stopped
        self._on_failed = on_failed
        self._killed = False
        """Whether the ranks were killed immediately, as a failure elsewhere requires."""
        self._recorders = FlightRecorders(folder, order.attempt)
        self._fabric_watch = FabricWatch(order, node=node, folder=folder, clock=clock, send=send)
        self._hang_detector = HangDetector(
            order, node=node, folder=folder, recorders=self._recorders, clock=clock, send=send
        )
        self._socket_watch = SocketWatch(
            order,
            node=node,
            clock=clock,
            pids=self._rank_pids,
            environ={**os.environ, **(order.launches[0].env if order.launches else {})},
            send=send,
            steps=lambda: self._step_aggregator.step_count,
        )
        self._stack_sampler = StackSampler(order, node=node, folder=folder, pids=self._rank_pids, send=send)
        self._step_aggregator = StepAggregator(
            order, node=node, send=send, node_metrics=self._socket_watch.step_metrics
        )
        self._exit_watcher = ExitWatcher(
            order,
            node=node,
            folder=folder,
            pid_of=self._running_pid,
            steps_of=self._step_count,
            report_finding=self._report_finding,
            kill=self._kill_ended_program,
        )
        self._memory_watch = MemoryWatch(
            node=node,
            replica=order.replica,
            pids=self._session_pids,
            steps_of=lambda rank: self._hang_detector.progress[rank].step,
            report_finding=self._report_finding,
            clock=clock,
        )
        self._traces = RankTraces(order, node=node, folder=folder, clock=clock, upload=upload_trace, send=send)
        self._reports = RankReports(
            order,
            node=node,
            clock=clock,
            hang_detector=self._hang_detector,
            step_aggregator=self._step_aggregator,
            send=send,
            report_finding=self._report_finding,
            on_step=on_step,
            on_gpu_memory=self._memory_watch.add_gpu,
            on_first_step=partial(self._schedule_prewarm, PREWARM_AFTER_FIRST_STEP_S),
            on_program_ended=self._exit_watcher.on_program_over,
            on_trace_written=self._traces.on_written,
            socket_of=lambda rank: next(process.socket for process in self.processes if rank in process.ranks),
        )
        self._orphans = OrphanProcesses(
            folder, run=order.env.get("HOLDFAST_RUN", ""), node=node, replica=order.replica, attempt=order.attempt
        )
        self._rank_sockets = RankSockets(sockets)
        self.processes = [RankProcess(launch, sockets / self._socket_name(launch), clock) for launch in order.launches]
        self._rank_servers = {
            launch.rank: RankServer(
                self._reports, rank=launch.rank, world_size=int(launch.env.get("WORLD_SIZE", 2**31))
            )
            for launch in order.launches
        }
        self._stopper = RankStopper(
            self.processes,
            node=node,
            replica=order.replica,
            has_closed=self._hang_detector.has_closed,
            report_finding=self._report_finding,
        )
        self._unreachable: set[int] = set()
        """Ranks whose process was reported as unable to reach this agent."""
        self._exit_tasks: set[asyncio.Task[None]] = set()
        self._started = asyncio.Event()
        self._exited_count = 0
        self._cancelled = asyncio.Event()
        """Set by an order to stop that arrives before any rank has started."""

    @property
    def running(self) -> tuple[RankState, ...]:
        return tuple(RankState(rank=process.rank, pid=process.pid) for process in self.processes if process.running)

    async def start(self) -> None:
        """Download the code, open the ranks' sockets, then start all ranks."""
        code, problem = await self._fetch_code()
        await self._open_rank_servers()
        await RankPreflight(
            self._order, node=self._node, report_finding=self._report_finding, cancelled=self._cancelled
        ).wait()
        if self._cancelled.is_set():
            self._finish()
            return
        if problem is not None:
            self._started.set()
            for process in self.processes:
                process.end_without_process(problem, self._on_exit)
            return
        self._orphans.create_cgroup()
        slots = {(self.replica, number): process for number, process in enumerate(self.processes)}
        self._commands = {
            slot: process.command(
                code,
                self._state_memory.environ(slot, peer_checkpoint=process.has_peer_checkpoint),
                self._recorders.env_defaults(process.socket)
                | self._fabric_watch.env_defaults(process.rank, {**os.environ, **process.launch.env}),
                cgroup=self._orphans.cgroup,
            )
            for slot, process in slots.items()
        }
        for slot, process in slots.items():
            self._recorders.add(process.ranks, self._commands[slot].environ)
        if not self._order.code_digest:
            self._comparing = asyncio.ensure_future(self._compare_sources([*self._commands.values()]))
        first = next((command for command in self._commands.values() if command.rank == 0), None)
        if first is not None and hosts_store(first.environ, range(1)):
            self._store_task = asyncio.ensure_future(self._host_store(first))
        for process, (slot, command) in zip(self.processes, self._commands.items(), strict=True):
            if self._echo is not None:
                speaker = OutputSource(replica=self.replica, rank=process.rank, attempt=self.attempt)
                self._echo.follow(
                    Path(process.launch.log), speaker, several=self._order.env.get("HOLDFAST_REPLICA_COUNT", "1") != "1"
                )
            await process.start(self._on_exit, command, self._fork_function(process, slot))
            if self._order.log_max_bytes is not None:
                who = f"rank {process.rank}{replica_suffix(self.replica)}"
                self._log_retention.add(who, Path(process.launch.log), self._order.log_max_bytes)
        started = tuple(RankState(rank=each.rank, pid=each.pid, prewarmed=each.prewarmed) for each in self.processes)
        self._send(
            RanksStarted(at=self._clock(), node=self._node, replica=self.replica, attempt=self.attempt, ranks=started)
        )
        self._started.set()
        if self._cancelled.is_set():  # the order to stop arrived during the start
            self.stop(0.0)
        self._hang_detector.start()
        self._fabric_watch.start()
        self._socket_watch.start()
        self._memory_watch.start()
        if first is not None:
            rank_0 = next(process for process in self.processes if process.rank == 0)
            self._rendezvous_check = RendezvousCheck(first, pid_of=lambda: rank_0.pid if rank_0.running else None)
            self._rendezvous_check.start()
        self._schedule_prewarm(PREWARM_AFTER_START_S)

    async def _compare_sources(self, programs: Sequence[RankCommand]) -> None:
        """Warn if code in place has changed since the last attempt started; runs concurrently with the start."""
        if finding := await self._sources.compare(self.replica, self.attempt, programs):
            self._report_finding(finding)

    async def _host_store(self, first: RankCommand) -> None:
        """Host the replica's store, since rank 0 is here and does not host it; runs concurrently with the start."""
        output = self._folder / f"tcp-store-{self.replica}.log"
        if finding := await self._store_host.serve(self.replica, int(first.environ["MASTER_PORT"]), first, output):
            self._report_finding(finding)

    def _socket_name(self, launch: RankLaunch) -> str:
        return f"{self.replica}-{self.attempt}-{launch.rank}"

    async def _open_rank_servers(self) -> None:
        """Open the ranks' sockets; if that fails, the ranks run without them."""
        servers = {self._socket_name(process.launch): self._rank_servers[process.rank] for process in self.processes}
        refusals = await self._rank_sockets.open(servers)
        for process in self.processes:
            process.socket = self._rank_sockets.folder / self._socket_name(process.launch)
        if refusals:
            self._report_unreachable([process.rank for process in self.processes], refusals)

    def _report_unreachable(self, ranks: list[int], refusals: tuple[str, ...]) -> None:
        """Report once per process that it cannot reach this agent."""
        if fresh := sorted(set(ranks) - self._unreachable):
            self._unreachable.update(fresh)
            self._report_finding(
                rank_channel_missing(self._node, ", ".join(map(str, fresh)) + replica_suffix(self.replica), refusals)
            )

    def _fork_function(self, process: RankProcess, slot: RankSlot) -> ForkFunction | None:
        return partial(self._prewarm_pool.fork, slot) if process.launch.prewarm else None

    def _schedule_prewarm(self, delay_s: float) -> None:
        """Start zygotes for the next start of these ranks after a delay."""
        if self._prewarm_timer is not None:
            self._prewarm_timer.cancel()
        if programs := self._prewarm_commands:
            later = asyncio.get_running_loop().call_later
            self._prewarm_timer = later(delay_s, self._prewarm_pool.keep_prewarmed, self.replica, programs)

    @property
    def _prewarm_commands(self) -> dict[RankSlot, RankCommand]:
        warm = {process.rank for process in self.processes if process.launch.prewarm}
        return {slot: command for slot, command in self._commands.items() if command.rank in warm}

    async def prewarm(self, code: Path) -> None:
        """Start zygotes for these ranks with the code in another folder, which the ranks will run soon."""
        await self._prewarm_pool.prewarm(
            {slot: command.with_code(code) for slot, command in self._prewarm_commands.items()}
        )

    async def _fetch_code(self) -> tuple[Path, ProcessExit | None]:
        """The folder that the ranks' `cwd` is relative to, or the failure; an order to stop ends the wait."""
        if not self._order.code_digest:
            return Path(), None
        self._code_task = asyncio.ensure_future(self._get_code(self._order.code_digest))
        await asyncio.wait([self._code_task])
        if self._code_task.cancelled():
            return Path(), None
        error = self._code_task.exception()
        if error is None:
            return self._code_task.result(), None
        if not isinstance(error, HoldfastError):
            raise error
        finding = error.findings[0]
        self._report_finding(finding)
        evidence = "; ".join(finding.evidence)
        return Path(), ProcessExit(
            at=self._clock(), reason=ExitReason.CODE_DELIVERY_FAILED, code=1, error=finding.what, evidence=evidence
        )

    def stop(self, grace_s: float, *, together: bool = False) -> None:
        """Stop every rank: SIGTERM and, `grace_s` later, SIGKILL; without grace SIGKILL immediately.

        `together` first notifies the Sessions that all replicas stop.
        """
        if not self._started.is_set():
            self._cancelled.set()
            if self._code_task is not None:
                self._code_task.cancel()
            return
        self._killed |= grace_s == 0.0

        def announce() -> None:
            if together:
                self.send_to_ranks(CheckpointAndExitNow(all_replicas=True))

        self._stopper.stop(grace_s, before=announce)

    def drain(self, grace_s: float) -> None:
        """Stop every rank because the node is being preempted: each has `grace_s` to save a checkpoint."""
        self._reports.draining = True
        self.send_to_ranks(TakeCheckpointNow())
        self.stop(grace_s)

    def send_to_ranks(self, request: AgentToRank) -> None:
        """Send a request to every connected rank."""
        for channel in self._rank_servers.values():
            channel.send(request)

    def inject(self, rank: int, drill: InjectRankFault) -> None:
        """Have a rank's Session inject a fault that no signal can; report if it has no Session."""
        self._send_to_sessions([self._rank_servers[rank]], drill, f"can inject `{drill.fault}`")

    def profile_steps(self, order: ProfileSteps) -> None:
        """Have the ranks profile their next steps; report if none has a Session or a step clock."""
        request = self._traces.request(order)
        if any(channel.step_clocks for channel in self._rank_servers.values()):
            self._reports.profile_clocked(request)
        else:
            self.send_to_sessions(request, "can profile its steps")

    def send_to_sessions(self, request: AgentToRank, what: str) -> None:
        """Send a request to the Sessions; report if no rank has one."""
        self._send_to_sessions([*self._rank_servers.values()], request, what)

    def _send_to_sessions(self, servers: Sequence[RankServer], request: AgentToRank, what: str) -> None:
        for channel in servers:
            channel.send(request)
        if not any(channel.connections for channel in servers):
            self._report_finding(
                Finding(
                    code="no-session",
                    severity=Severity.WARNING,
                    what=f"no rank of node{self._node} has opened a Session, so none {what}",
                    where=f"node{self._node}",
                    remedy="Ranks that are still starting will have one; others need the few lines of holdfast.train.",
                )
            )

    def pid_of(self, rank: int) -> int | None:
        """A rank's own pid: that of its Session, which a launcher may have started, or of the started process."""
        progress = self._hang_detector.progress.get(rank)
        if progress is not None:
            return None if progress.closed else progress.pid
        return next((process.pid for process in self.processes if process.rank == rank and process.running), None)

    def write_output(self, rank: int, text: str) -> None:
        """Write to a rank's log as if it had, for a drill."""
        process = next(process for process in self.processes if rank in process.ranks)
        with open(process.launch.log, "a", encoding="utf-8") as log:
            log.write(text)

    def report_silent(self, *, all_ranks: bool) -> None:
        """Report as silent the ranks that have not connected, or all: others wait for them.

        Ranks that cannot reach this agent are left out, since their silence means nothing.
        """
        running = [process for process in self.processes if process.running]
        pids = {rank: pid for process in running for rank, pid in process.pids().items()}
        cut_off = [process for process in running if not self._rank_servers[process.rank].reachable]
        silent = {rank for process in cut_off for rank in process.pids() if rank not in self._hang_detector.progress}
        if lost := [process for process in cut_off if silent & process.pids().keys()]:
            gone = tuple(f"{process.socket} is gone" for process in lost)
            self._report_unreachable([process.rank for process in lost], gone)
        self._hang_detector.report_silent(
            {rank: pid for rank, pid in pids.items() if rank not in silent}, all_ranks=all_ranks
        )

    def _rank_pids(self) -> dict[int, int]:
        """The pid of each running rank."""
        running = (process for process in self.processes if process.running)
        return {rank: pid for process in running for rank, pid in process.pids().items()}

    def _session_pids(self) -> dict[int, int]:
        """The pid of each rank that has a Session."""
        return {rank: each.pid for rank, each in self._hang_detector.progress.items() if not each.closed}

    def _running_pid(self, rank: int) -> int | None:
        """A rank's own pid while it runs, even after its Session has ended."""
        process = next((process for process in self.processes if rank in process.ranks and process.running), None)
        if process is None:
            return None
        progress = self._hang_detector.progress.get(rank)
        return progress.pid if progress is not None and process.launch.rank_count > 1 else process.pid

    def _step_count(self, rank: int) -> int:
        """A number that grows with the steps of the ranks of a rank's process."""
        process = next(process for process in self.processes if rank in process.ranks)
        progress_by_rank = self._hang_detector.progress
        return sum(progress_by_rank[each].step for each in process.ranks if each in progress_by_rank)

    def _kill_ended_program(self, rank: int) -> bool:
        """Kill a rank's process if the programs of all its ranks have ended."""
        process = next(process for process in self.processes if rank in process.ranks)
        code = self._exit_watcher.exit_code(process.ranks)
        if code is None:
            return False
        for each in process.ranks:
            self._hang_detector.mark_closed(each)
        process.kill_as_exited(code)
        return True

    def kill_orphans(self) -> None:
        """Kill every process of the attempt immediately, because the agent exits; do not wait for reports."""
        self._orphans.kill([process.pid for process in self.processes if process.pid])

    def dump_stacks(self, order: DumpStacks) -> None:
        """Dump the stacks of every rank, once or in several rounds."""
        if order.rounds > 1:
            self._stack_sampler.start(order)
            return
        for rank, pid in self._rank_pids().items():
            self._hang_detector.dump_stacks(rank, pid, native=order.native)

    def _report_finding(self, finding: Finding) -> None:
        self._send(FindingRaised(at=self._clock(), finding=finding))

    # Exits of ranks

    def _on_exit(self, process: RankProcess) -> None:
        self._exit_tasks.add(asyncio.ensure_future(self._report_exit(process)))

    async def _report_exit(self, process: RankProcess) -> None:
        """Report how a rank exited, after its own messages and after all ranks have started."""
        await self._started.wait()
        await self._rank_servers[process.rank].drain(IPC_DRAIN_TIMEOUT_S)
        for rank in self._rank_servers[process.rank].known_ranks:
            self._reports.send_pending_checkpoint(rank)
        self._step_aggregator.flush()
        if process.succeeded and (at_work := self._hang_detector.running_ranks(process.ranks)):
            process.mark_orphaned_ranks(at_work[0])
        ended = process.exit
        assert ended is not None
        self._hang_detector.mark_closed(process.rank)
        progress = self._hang_detector.progress.get(process.rank)
        by_code = ended.reason is ExitReason.CODE and ended.code == ExitCode.CHECKPOINTED_AND_EXITED
        self._send(
            RankExited(
                at=ended.at,
                node=self._node,
                replica=self.replica,
                attempt=self.attempt,
                rank=process.rank,
                reason=ended.reason,
                code=ended.code,
                stopped=ended.stopped,
                error=ended.error,
                evidence=ended.evidence,
                device_fault=ended.device_fault,
                first_failed_rank=ended.first_failed_rank,
                error_location=ended.error_location,
                last_step=progress.step if progress else -1,
                has_session=progress is not None and progress.has_session,
                exited_on_request=by_code and self._hang_detector.exited_on_request(process.ranks),
            )
        )
        self._exited_count += 1
        if self._exited_count == len(self.processes):
            self._finish()

    def _finish(self) -> None:
        """Clean up once all ranks have exited: kill their orphans, then report that none is left."""
        self._hang_detector.stop()
        self._reports.stop()
        self._stack_sampler.stop()
        self._recorders.close()
        self._fabric_watch.stop()
        self._socket_watch.stop()
        self._memory_watch.stop()
        self._exit_watcher.stop()
        if self._store_task is not None:
            self._store_task.cancel()
            self._store_host.close(self.replica)
        self._stopper.cancel()
        if self._prewarm_timer is not None:
            self._prewarm_timer.cancel()
        for channel in self._rank_servers.values():
            channel.close()
        self._rank_sockets.clean_up()
        self._reports.report_drop_totals()
        well = all(process.succeeded for process in self.processes)
        if self._rendezvous_check is not None:
            self._rendezvous_check.stop()
            if self._rendezvous_check.missed and well and 0 not in self._hang_detector.progress:
                self._report_finding(no_rendezvous_finding(self._node, self.replica))
        ranks = [process.pid for process in self.processes if process.pid]
        if ranks:
            launcher = any(process.launch.rank_count > 1 for process in self.processes)
            finding = self._orphans.finding(f"node{self._node}", ranks, succeeded=well, launcher=launcher)
            if finding is not None:
                self._report_finding(finding)
        if left := self._orphans.kill(ranks):
            log.error("processes %s outlive SIGKILL; the kernel keeps them", left)
        for process in self.processes:
            process.clean_up()
            self._log_retention.remove(Path(process.launch.log))
            if self._echo is not None:
                self._echo.drain(Path(process.launch.log))
        self._rendezvous_port.renew()
        self._send(
            RanksStopped(
                at=self._clock(),
                node=self._node,
                replica=self.replica,
                attempt=self.attempt,
                port=self._rendezvous_port.number,
            )
        )
        if self._killed or any(process.failed for process in self.processes):
            self._on_failed(self._failed_ranks())
        self._on_stopped(self)

    def _failed_ranks(self) -> FailedRanks:
        return FailedRanks(
            folder=self._folder,
            replica=self.replica,
            replica_count=int(self._order.env.get("HOLDFAST_REPLICA_COUNT", "1")),
            attempt=self.attempt,
            logs=tuple(Path(process.launch.log) for process in self.processes),
            environs={command.rank: command.environ for command in self._commands.values()},
            secret_names=frozenset(self._order.secret_names),
        )
