"""Owns one attempt's ranks on this node: started together, watched together, ended together.

What happens is said through `say`. When no process of the attempt is left, `RanksStopped` is said, once, with a fresh
port for the next rendezvous.

One file, longer than others, because starting, watching and ending ranks are one order of things over one state.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from holdfast.agent.allowance import CHECKPOINTS, FINDINGS, Bucket, Drops, Why
from holdfast.agent.channel import RankChannel
from holdfast.agent.echo import Echo
from holdfast.agent.handed import Handed
from holdfast.agent.held import Wanted
from holdfast.agent.leftovers import Leftovers
from holdfast.agent.march import March
from holdfast.agent.meeting import Meeting, never_met
from holdfast.agent.overtime import Overtime
from holdfast.agent.port import HeldPort
from holdfast.agent.rank import Ended, Fork, RankProcess
from holdfast.agent.readiness import Readiness
from holdfast.agent.retention import Retention
from holdfast.agent.sockets import Sockets, no_channel
from holdfast.agent.sources import Sources
from holdfast.agent.storehost import StoreHost, hosts
from holdfast.agent.vigil import Pulse, Vigil
from holdfast.agent.warmth import Slot, Warmth
from holdfast.clock import Clock
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import (
    AgentEvent,
    CheckpointCommitted,
    FindingRaised,
    RankExit,
    RankExited,
    RanksLeaving,
    RanksStarted,
    RanksStopped,
    RankState,
)
from holdfast.events.clipping import clipped_finding
from holdfast.events.echoed import Speaker
from holdfast.events.metrics import DroppedMetrics
from holdfast.events.orders import Progress, RankLaunch, StartRanks
from holdfast.events.rank import (
    AgentToRank,
    Befall,
    Checkpointed,
    CheckpointNow,
    Doing,
    Found,
    Hello,
    Leaving,
    Misfortune,
    ProgramOver,
    RankToAgent,
    Step,
    StopNow,
    Turned,
)
from holdfast.findings import Finding, Severity, of_replica
from holdfast.host.processes import state_letter

log = logging.getLogger("holdfast.agent")

ECHO_S = 60.0
"""The same that other ranks notice within this time is known: a loss that is no number soon is every rank's."""

LEAVING_S = 2.0
"""Longest that a rank which has hung up gets to end by itself before it is killed: an interpreter clears up first."""

SETTLE_S = 5.0
"""Time from an attempt's first step until programs are held for the next one."""

SPEECHLESS_S = 30.0
"""The same from the start of ranks that tell of no step."""

LAST_WORDS_S = 0.25
"""Longest to wait for the last words of a rank that has ended; only a child that keeps its socket makes it so long."""


@dataclass
class _Allowances:
    """What one rank may still have passed on."""

    metrics: DroppedMetrics
    findings: Bucket = field(default_factory=lambda: Bucket(FINDINGS))
    checkpoints: Bucket = field(default_factory=lambda: Bucket(CHECKPOINTS))
    newest: Checkpointed | None = None
    """The latest checkpoint that waits to be passed on, until `later`."""
    later: asyncio.TimerHandle | None = None


class Team:
    """The ranks of one replica on this node, in one attempt."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        sockets: Path,
        folder: Path,
        port: HeldPort,
        clock: Clock,
        code: Callable[[str], Coroutine[None, None, Path]],
        retention: Retention,
        warmth: Warmth,
        handed: Handed,
        stores: StoreHost,
        sources: Sources,
        say: Callable[[AgentEvent | Progress], int],
        on_step: Callable[[int, int], None],
        on_stopped: Callable[[Team], None],
        echo: Echo | None = None,
    ) -> None:
        self.replica = order.replica
        self.attempt = order.attempt
        self._order = order
        self._node = node
        self._folder = folder
        self._port = port
        self._clock = clock
        self._code = code
        self._fetch: asyncio.Task[Path] | None = None
        self._retention = retention
        self._echo = echo
        self._warmth = warmth
        self._handed = handed
        self._stores = stores
        self._sources = sources
        self._comparing: asyncio.Task[None] | None = None
        self._hosting: asyncio.Task[None] | None = None
        self._meeting: Meeting | None = None
        self._meeting_watch: asyncio.Task[None] | None = None
        self._warming: asyncio.TimerHandle | None = None
        self._programs: dict[Slot, Wanted] = {}
        self._say = say
        self._on_step = on_step
        self._on_stopped = on_stopped
        self._vigil = Vigil(order, node=node, folder=folder, clock=clock, say=say)
        self._march = March(order, node=node, say=say)
        self._overtime = Overtime(
            order,
            node=node,
            folder=folder,
            pid_of=self._lingering,
            steps_of=self._steps,
            find=self._found,
            end=self._conclude,
        )
        self._leftovers = Leftovers(
            folder, run=order.env.get("HOLDFAST_RUN", ""), node=node, replica=order.replica, attempt=order.attempt
        )
        self._sockets = Sockets(sockets)
        self.processes = [RankProcess(launch, sockets / self._socket_name(launch), clock) for launch in order.launches]
        self._channels = {
            launch.rank: RankChannel(self, rank=launch.rank, world_size=int(launch.env.get("WORLD_SIZE", 2**31)))
            for launch in order.launches
        }
        self._drops = Drops(node)
        self._allowances: dict[int, _Allowances] = {}
        """Of each rank, for what it has passed on."""
        self._cut_off: set[int] = set()
        """Processes, by rank, of which it was said that they cannot reach this agent."""
        self._ends: set[asyncio.Task[None]] = set()
        self._noticed: dict[str, tuple[int, float]] = {}
        """Which rank said a finding of each code last, and when."""
        self._killer: asyncio.TimerHandle | None = None
        self._parts = False
        """Whether the node is taken away, and no rank has yet said that it takes no further step."""
        self._started = asyncio.Event()
        self._ended_ranks = 0
        self._abandoned = asyncio.Event()
        """The order to stop came before anything was started."""

    @property
    def running(self) -> tuple[RankState, ...]:
        return tuple(RankState(rank=process.rank, pid=process.pid) for process in self.processes if process.running)

    async def start(self) -> None:
        """Get the code and open the ranks' sockets, then start them all."""
        code, problem = await self._ready_code()
        await self._open_channels()
        await Readiness(self._order, node=self._node, find=self._found, abandoned=self._abandoned).wait()
        if self._abandoned.is_set():
            self._clear_away()
            return
        if problem is not None:
            self._started.set()
            for process in self.processes:
                process.give_up(problem, self._ended)
            return
        self._leftovers.prepare()
        slots = {(self.replica, number): process for number, process in enumerate(self.processes)}
        self._programs = {
            slot: process.wanted(code, self._handed.variables(slot, copies=process.copies), group=self._leftovers.group)
            for slot, process in slots.items()
        }
        if not self._order.code:
            self._comparing = asyncio.ensure_future(self._compare_sources([*self._programs.values()]))
        self._host_store()
        for process, (slot, wanted) in zip(self.processes, self._programs.items(), strict=True):
            if self._echo is not None:
                speaker = Speaker(replica=self.replica, rank=process.rank, attempt=self.attempt)
                self._echo.follow(
                    Path(process.launch.log), speaker, several=self._order.env.get("HOLDFAST_REPLICA_COUNT", "1") != "1"
                )
            await process.start(self._ended, wanted, self._fork(process, slot))
            if self._order.log_max_bytes is not None:
                who = f"rank {process.rank}{of_replica(self.replica)}"
                self._retention.keep(who, Path(process.launch.log), self._order.log_max_bytes)
        started = tuple(RankState(rank=each.rank, pid=each.pid, warm=each.warm) for each in self.processes)
        self._say(
            RanksStarted(at=self._clock(), node=self._node, replica=self.replica, attempt=self.attempt, ranks=started)
        )
        self._started.set()
        if self._abandoned.is_set():  # the order to stop came while they were being started
            self.stop(0.0)
        self._vigil.begin()
        self._watch_meeting()
        self._warm_up(SPEECHLESS_S)

    async def _compare_sources(self, programs: Sequence[Wanted]) -> None:
        """Warn of code in place that is not what the attempt before was started with; beside the ranks' start."""
        if finding := await self._sources.compare(self.replica, self.attempt, programs):
            self._found(finding)

    def _host_store(self) -> None:
        """Host the store that the replica's ranks meet at, where rank 0 is here and is not to; beside their start."""
        first = next((wanted for wanted in self._programs.values() if wanted.rank == 0), None)
        if first is not None and hosts(first.environ, range(1)):
            self._hosting = asyncio.ensure_future(self._serve(first))

    async def _serve(self, first: Wanted) -> None:
        output = self._folder / f"store-{self.replica}.log"
        if finding := await self._stores.serve(self.replica, int(first.environ["MASTER_PORT"]), first, output):
            self._found(finding)

    def _watch_meeting(self) -> None:
        """Watch whether rank 0 ever meets the others, where it is here and is meant to."""
        first = next((process for process in self.processes if process.rank == 0), None)
        wanted = next((wanted for wanted in self._programs.values() if wanted.rank == 0), None)
        if first is not None and wanted is not None:
            self._meeting = Meeting(wanted, pid_of=lambda: first.pid if first.running else None)
            self._meeting_watch = asyncio.ensure_future(self._meeting.watch())

    def _say_never_met(self) -> None:
        """Warn of a rank 0 without a Session that ended well and never met another rank."""
        if self._meeting_watch is not None:
            self._meeting_watch.cancel()
        well = all(process.ended_well for process in self.processes)
        if self._meeting is not None and self._meeting.missed and well and 0 not in self._vigil.pulses:
            self._found(never_met(self._node, self.replica))

    def _socket_name(self, launch: RankLaunch) -> str:
        return f"{self.replica}-{self.attempt}-{launch.rank}"

    async def _open_channels(self) -> None:
        """Open the ranks' sockets; ranks run without a channel rather than not at all."""
        channels = {self._socket_name(process.launch): self._channels[process.rank] for process in self.processes}
        refusals = await self._sockets.open(channels)
        for process in self.processes:
            process.socket = self._sockets.folder / self._socket_name(process.launch)
        if refusals:
            self._say_cut_off([process.rank for process in self.processes], refusals)

    def _say_cut_off(self, ranks: list[int], refusals: tuple[str, ...]) -> None:
        """Some processes cannot reach this agent, which is said once of each."""
        if fresh := sorted(set(ranks) - self._cut_off):
            self._cut_off.update(fresh)
            self._found(no_channel(self._node, ", ".join(map(str, fresh)) + of_replica(self.replica), refusals))

    def _fork(self, process: RankProcess, slot: Slot) -> Fork | None:
        return partial(self._warmth.fork, slot) if process.launch.warm else None

    def _warm_up(self, delay_s: float) -> None:
        """Have the programs of these ranks held, for their next start, after so long."""
        if self._warming is not None:
            self._warming.cancel()
        if programs := self._warm_programs:
            later = asyncio.get_running_loop().call_later
            self._warming = later(delay_s, self._warmth.keep, self.replica, programs)

    @property
    def _warm_programs(self) -> dict[Slot, Wanted]:
        warm = {process.rank for process in self.processes if process.launch.warm}
        return {slot: wanted for slot, wanted in self._programs.items() if wanted.rank in warm}

    async def prepare(self, code: Path) -> None:
        """Have these ranks' programs held as they are in another folder of code, which they are to run soon."""
        await self._warmth.prepare({slot: wanted.with_code(code) for slot, wanted in self._warm_programs.items()})

    async def _ready_code(self) -> tuple[Path, Ended | None]:
        """The folder that the ranks' `cwd` starts from, or why there is none; an order to stop ends the wait."""
        if not self._order.code:
            return Path(), None
        self._fetch = asyncio.ensure_future(self._code(self._order.code))
        await asyncio.wait([self._fetch])
        if self._fetch.cancelled():
            return Path(), None
        error = self._fetch.exception()
        if error is None:
            return self._fetch.result(), None
        if not isinstance(error, HoldfastError):
            raise error
        finding = error.findings[0]
        self._found(finding)
        evidence = "; ".join(finding.evidence)
        return Path(), Ended(at=self._clock(), how=RankExit.NO_CODE, code=1, error=finding.what, evidence=evidence)

    def stop(self, grace_s: float, *, together: bool = False) -> None:
        """End every rank: SIGTERM and, `grace_s` later, SIGKILL; no grace means SIGKILL at once.

        Sessions of replicas that all end `together` hear of it first.
        """
        if not self._started.is_set():
            self._abandoned.set()
            if self._fetch is not None:
                self._fetch.cancel()
            return
        kill_at = asyncio.get_running_loop().time() + grace_s
        if self._killer is not None:
            if self._killer.when() <= kill_at:
                return  # asked again: the first grace holds
            self._killer.cancel()
        if grace_s <= 0:
            self._kill_at_once()
            return
        if together:
            self.ask(StopNow(together=True))
        self._signal_all(signal.SIGTERM)
        self._killer = asyncio.get_running_loop().call_at(kill_at, self._kill_stubborn, grace_s)

    def part(self, grace_s: float) -> None:
        """End every rank because the node is taken away: each has `grace_s` to save, and it is said when one has."""
        self._parts = True
        self.ask(CheckpointNow())
        self.stop(grace_s)

    def ask(self, request: AgentToRank) -> None:
        """Ask something of every rank that speaks to us."""
        for channel in self._channels.values():
            channel.ask(request)

    def befall(self, rank: int, what: Misfortune) -> None:
        """Have a rank's Session do to itself what no signal does; says so where it has none."""
        self._to_sessions([self._channels[rank]], Befall(what=what), f"does `{what}`")

    def ask_sessions(self, request: AgentToRank, what: str) -> None:
        """Ask something that a Session does; says so where no rank has one."""
        self._to_sessions([*self._channels.values()], request, what)

    def _to_sessions(self, channels: Sequence[RankChannel], request: AgentToRank, what: str) -> None:
        for channel in channels:
            channel.ask(request)
        if not any(channel.ranks for channel in channels):
            self._found(
                Finding(
                    code="no-session",
                    severity=Severity.WARNING,
                    what=f"no rank of node{self._node} has opened a Session, so none {what} when asked",
                    where=f"node{self._node}",
                    remedy="Ranks that are still starting will have one; others need the few lines of holdfast.train.",
                )
            )

    def pid_of(self, rank: int) -> int | None:
        """A rank's own process: the one that speaks to us, which a launcher may have started, or else ours."""
        pulse = self._vigil.pulses.get(rank)
        if pulse is not None:
            return None if pulse.over else pulse.pid
        return next((process.pid for process in self.processes if process.rank == rank and process.running), None)

    def look(self, *, everyone: bool) -> None:
        """Report the ranks that have yet to speak, or all: others wait in vain, and may wait for these.

        A rank that cannot have reached this agent is no suspect for its silence.
        """
        running = [process for process in self.processes if process.running]
        pids = {rank: pid for process in running for rank, pid in process.pids().items()}
        cut_off = [process for process in running if not self._channels[process.rank].reachable]
        silent = {rank for process in cut_off for rank in process.pids() if rank not in self._vigil.pulses}
        if lost := [process for process in cut_off if silent & process.pids().keys()]:
            gone = tuple(f"{process.socket} is gone" for process in lost)
            self._say_cut_off([process.rank for process in lost], gone)
        self._vigil.look({rank: pid for rank, pid in pids.items() if rank not in silent}, everyone=everyone)

    def _lingering(self, rank: int) -> int | None:
        """A rank's own process while it runs, whether or not its Session has ended."""
        process = next((process for process in self.processes if rank in process.ranks and process.running), None)
        if process is None:
            return None
        pulse = self._vigil.pulses.get(rank)
        return pulse.pid if pulse is not None and process.launch.ranks > 1 else process.pid

    def _steps(self, rank: int) -> int:
        """A number that grows with the steps of the ranks that a rank's process stands for."""
        process = next(process for process in self.processes if rank in process.ranks)
        pulses = self._vigil.pulses
        return sum(pulses[each].step for each in process.ranks if each in pulses)

    def _conclude(self, rank: int) -> bool:
        """End the process that stands for a rank, if the programs of all its ranks have ended."""
        process = next(process for process in self.processes if rank in process.ranks)
        code = self._overtime.code(process.ranks)
        if code is None:
            return False
        for each in process.ranks:
            self._vigil.over(each)
        process.conclude(code)
        return True

    def end_leftovers(self) -> None:
        """The agent leaves: end every process of the attempt at once, whatever is still to be reported of it."""
        self._leftovers.end([process.pid for process in self.processes if process.pid])

    def take_stacks(self) -> None:
        """Say where every rank stands."""
        running = (process for process in self.processes if process.running)
        for rank, pid in ((rank, pid) for process in running for rank, pid in process.pids().items()):
            self._vigil.take_stacks(rank, pid)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.stop(number)
            if number is not signal.SIGKILL:
                process.signal(signal.SIGCONT, group=True)

    def _kill_at_once(self) -> None:
        """Kill every rank; one that has hung up is on its way out, and how it ends by itself may be the cause."""
        leaving = [
            process
            for process in self.processes
            if process.running and process.launch.ranks == 1 and self._vigil.hung_up(process.rank)
        ]
        for process in self.processes:
            if process not in leaving:
                process.stop(signal.SIGKILL)
        if leaving:
            self._killer = asyncio.get_running_loop().call_later(LEAVING_S, self._signal_all, signal.SIGKILL)

    def _kill_stubborn(self, grace_s: float) -> None:
        """The grace is over: kill what is left, and say who has not used it."""
        stubborn = [process for process in self.processes if process.running]
        if stubborn:
            ranks = ", ".join(str(process.rank) for process in stubborn) + of_replica(self.replica)
            states = tuple(
                f"rank {process.rank}, process {process.pid}, state {state_letter(process.pid)}" for process in stubborn
            )
            finding = Finding(
                code="ignored-sigterm",
                severity=Severity.WARNING,
                what=f"rank {ranks} was still there {grace_s:g} s after SIGTERM, and was killed",
                where=f"node{self._node}",
                evidence=states[:8],
                remedy="Have the program end on SIGTERM (a Session does), or raise `recovery.stop_grace_s`.",
            )
            self._found(finding)
        self._signal_all(signal.SIGKILL)

    def _found(self, finding: Finding) -> None:
        self._say(FindingRaised(at=self._clock(), finding=finding))

    # What ranks say

    def hung_up(self, rank: int) -> None:
        """A rank has closed its connection."""
        self._vigil.over(rank)

    def drop(self, rank: int, why: Why, sample: str) -> None:
        """A message of a rank was dropped."""
        if (finding := self._drops.count(rank, why, sample)) is not None:
            log.warning("%s: %s", finding.what, sample)
            self._found(finding)

    def hear(self, rank: int, message: RankToAgent, dropped: Mapping[str, str]) -> None:
        """Take in a rank's message; `dropped` are metrics that it could not have, and why."""
        match message:
            case Hello():
                self._vigil.hello(rank, Pulse(message.pid, self._clock.lead_s(message.clock) or 0.0))
                self._march.enter(rank)
            case Step():
                pulse = self._vigil.pulses[rank]
                if pulse.step < 0:
                    self._warm_up(SETTLE_S)
                pulse.passed(message.step)
                self._march.take(rank, _on_our_clock(message, pulse.ahead_s))
                self._on_step(rank, message.step)
                for finding in self._allowed(rank).metrics.report(message.step, dropped):
                    self._found(finding)
            case Turned():
                self._vigil.pulses[rank].turned(message.to)
                if self._parts and message.to is Doing.REST:
                    self._say_parted()
            case Checkpointed():
                self._checkpointed(rank, message)
            case ProgramOver():
                self._overtime.begin(message)
            case Leaving():
                self._vigil.pulses[rank].leaving = True
            case Found(finding=finding):
                self._noted(rank, clipped_finding(finding))

    def _allowed(self, rank: int) -> _Allowances:
        if rank not in self._allowances:
            who = f"rank {rank}{of_replica(self.replica)} on node{self._node}"
            self._allowances[rank] = _Allowances(DroppedMetrics(who))
        return self._allowances[rank]

    def _checkpointed(self, rank: int, message: Checkpointed) -> None:
        """Pass a checkpoint on; of too many in a row only the newest, once it is time for it."""
        allowed, now = self._allowed(rank), time.monotonic()
        if allowed.later is not None:
            allowed.newest = message
        elif allowed.checkpoints.take(1, now):
            self._say_checkpointed(message)
        else:
            allowed.newest = message
            wait_s = allowed.checkpoints.wait_s(1, now)
            allowed.later = asyncio.get_running_loop().call_later(wait_s, self._say_newest, rank)

    def _say_newest(self, rank: int) -> None:
        allowed = self._allowed(rank)
        if allowed.later is not None and allowed.newest is not None:
            allowed.later.cancel()
            allowed.checkpoints.owe(1, time.monotonic())
            self._say_checkpointed(allowed.newest)
        allowed.later = allowed.newest = None

    def _say_checkpointed(self, message: Checkpointed) -> None:
        self._march.say()  # the step comes before its checkpoint
        self._say(
            CheckpointCommitted(
                at=self._clock(),
                node=self._node,
                replica=self.replica,
                attempt=self.attempt,
                step=message.step,
                path=message.path,
                took_s=message.took_s,
            )
        )

    def _noted(self, rank: int, finding: Finding) -> None:
        """Pass a finding on, unless another rank has just said the same, or this one says too many."""
        first, at = self._noticed.get(finding.code, (rank, 0.0))
        if first != rank and time.monotonic() - at < ECHO_S:
            return
        if not self._allowed(rank).findings.take(1, time.monotonic()):
            self.drop(rank, Why.FINDINGS, finding.what)
            return
        self._noticed[finding.code] = rank, time.monotonic()
        self._found(finding)

    def _say_parted(self) -> None:
        self._parts = False
        self._march.say()
        self._say(RanksLeaving(at=self._clock(), node=self._node, replica=self.replica, attempt=self.attempt))

    # How ranks end

    def _ended(self, process: RankProcess) -> None:
        self._ends.add(asyncio.ensure_future(self._tell_end(process)))

    async def _tell_end(self, process: RankProcess) -> None:
        """Say how a rank ended, after all that it has said itself, and after all were started."""
        await self._started.wait()
        await self._channels[process.rank].hear_out(LAST_WORDS_S)
        for rank in self._channels[process.rank].known:
            self._say_newest(rank)
        self._march.say()
        if process.ended_well and (at_work := self._vigil.at_work(process.ranks)):
            process.disown(at_work[0])
        ended = process.ended
        assert ended is not None
        self._vigil.over(process.rank)
        pulse = self._vigil.pulses.get(process.rank)
        by_code = ended.how is RankExit.CODE and ended.code == ExitCode.STOPPED_EARLY
        self._say(
            RankExited(
                at=ended.at,
                node=self._node,
                replica=self.replica,
                attempt=self.attempt,
                rank=process.rank,
                how=ended.how,
                code=ended.code,
                stopped=ended.stopped,
                error=ended.error,
                evidence=ended.evidence,
                culprit=ended.culprit,
                log=ended.log,
                last_step=pulse.step if pulse else -1,
                said_hello=pulse is not None,
                left=by_code and self._vigil.left(process.ranks),
            )
        )
        self._ended_ranks += 1
        if self._ended_ranks == len(self.processes):
            self._clear_away()

    def _clear_away(self) -> None:
        """All ranks have ended: end what they left behind, then say that nothing is left."""
        self._vigil.end()
        self._overtime.stop()
        if self._hosting is not None:
            self._hosting.cancel()
            self._stores.close(self.replica)
        for timer in (self._killer, self._warming):
            if timer is not None:
                timer.cancel()
        for channel in self._channels.values():
            channel.close()
        self._sockets.clear_away()
        for finding in self._drops.totals():
            self._found(finding)
        self._say_never_met()
        ranks = [process.pid for process in self.processes if process.pid]
        if ranks:
            well = all(process.ended_well for process in self.processes)
            launcher = any(process.launch.ranks > 1 for process in self.processes)
            finding = self._leftovers.finding(f"node{self._node}", ranks, well=well, launcher=launcher)
            if finding is not None:
                self._found(finding)
        if left := self._leftovers.end(ranks):
            log.error("processes %s outlive SIGKILL; the kernel holds them", left)
        for process in self.processes:
            process.clear_away()
            self._retention.release(Path(process.launch.log))
            if self._echo is not None:
                self._echo.release(Path(process.launch.log))
        self._port.renew()
        self._say(
            RanksStopped(
                at=self._clock(), node=self._node, replica=self.replica, attempt=self.attempt, port=self._port.number
            )
        )
        self._on_stopped(self)


def _on_our_clock(step: Step, ahead_s: float) -> Step:
    return msgspec.structs.replace(step, started=step.started - ahead_s, ended=step.ended - ahead_s)
