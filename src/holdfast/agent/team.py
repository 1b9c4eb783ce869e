"""Owns one attempt's ranks on this node: started together, watched together, ended together.

What happens is said through `say`. When no process of the attempt is left, `RanksStopped` is said, once, with a fresh
port for the next rendezvous.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.agent.channel import RankChannel
from holdfast.agent.leftovers import Leftovers
from holdfast.agent.port import HeldPort
from holdfast.agent.rank import Ended, RankProcess
from holdfast.agent.readiness import Readiness
from holdfast.agent.retention import Retention
from holdfast.agent.stacks import take
from holdfast.clock import Clock
from holdfast.errors import HoldfastError
from holdfast.events import (
    AgentEvent,
    CheckpointCommitted,
    FindingRaised,
    RankExit,
    RankExited,
    RankHung,
    RanksStarted,
    RanksStopped,
    RankState,
)
from holdfast.events.orders import Progress, StartRanks, StepPassed
from holdfast.events.rank import AgentToRank, Checkpointed, Found, Hello, RankToAgent, Step
from holdfast.findings import Finding, Severity
from holdfast.launch.local.processes import state_letter
from holdfast.measure.catalog import shared, together

log = logging.getLogger("holdfast.agent")

STEPS_TOGETHER = 128
"""Steps in one word at most: with every metric they may have they stay below the port's limit (guard/limits.py)."""

FIRST_STEP_FACTOR = 10.0
"""The first step of an attempt may take this many step deadlines: it loads, compiles and connects."""

LAST_WORDS_S = 0.25
"""Longest to wait for the last words of a rank that has ended; only a child that keeps its socket makes it so long."""


@dataclass
class _Pulse:
    """What a rank that speaks to us has said of its steps."""

    pid: int
    ahead_s: float
    """How far its clock is ahead of ours."""
    step: int = -1
    at: float = field(default_factory=time.monotonic)
    """Monotonic seconds of its last word."""
    hung: bool = False
    over: bool = False
    """Whether it has hung up or ended: it is silent for a reason."""
    words: list[Step] = field(default_factory=list[Step])
    """Steps that the node's other ranks have yet to pass."""


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
        say: Callable[[AgentEvent | Progress], int],
        on_step: Callable[[int, int], None],
        on_stopped: Callable[[Team], None],
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
        self._say = say
        self._on_step = on_step
        self._on_stopped = on_stopped
        self._expected = sum(launch.ranks for launch in order.ranks)
        names = {launch.rank: sockets / f"{order.replica}-{order.attempt}-{launch.rank}" for launch in order.ranks}
        self.processes = [RankProcess(launch, names[launch.rank], clock) for launch in order.launches]
        self._channels = {rank: RankChannel(path, self._hear, self._part) for rank, path in names.items()}
        self._ends: set[asyncio.Task[None]] = set()
        self._pulses: dict[int, _Pulse] = {}
        self._passed: list[StepPassed] = []
        self._said_at = 0.0
        self._flush: asyncio.TimerHandle | None = None
        self._killer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reports: set[asyncio.Task[None]] = set()
        self._started = False
        self._ended_ranks = 0
        self._abandoned = asyncio.Event()
        """The order to stop came before anything was started."""

    @property
    def running(self) -> tuple[RankState, ...]:
        return tuple(RankState(rank=process.rank, pid=process.pid) for process in self.processes if process.running)

    async def start(self) -> None:
        """Get the code and open the ranks' sockets, then start them all."""
        code, problem = await self._ready_code()
        try:
            await asyncio.gather(*(channel.open() for channel in self._channels.values()))
        except OSError as error:
            # The ranks run without a channel rather than not at all; they say so themselves.
            log.error("no channel to ranks: %s", error)
        await Readiness(self._order, node=self._node, find=self._found, abandoned=self._abandoned).wait()
        if self._abandoned.is_set():
            self._clear_away()
            return
        self._started = True
        for process in self.processes:
            if problem is None:
                process.start(self._ended, code)
                if self._order.log_max_bytes is not None:
                    self._retention.keep(process.rank, Path(process.launch.log), self._order.log_max_bytes)
            else:
                process.give_up(problem, self._ended)
        if problem is not None:
            return
        started = tuple(RankState(rank=process.rank, pid=process.pid) for process in self.processes)
        self._say(
            RanksStarted(at=self._clock(), node=self._node, replica=self.replica, attempt=self.attempt, ranks=started)
        )
        if self._order.step_deadline_s is not None:
            self._watch = asyncio.ensure_future(self._watch_for_hangs(self._order.step_deadline_s))

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

    def stop(self, grace_s: float) -> None:
        """End every rank: SIGTERM and, `grace_s` later, SIGKILL; no grace means SIGKILL at once."""
        if not self._started:
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
            self._signal_all(signal.SIGKILL)
            return
        self._signal_all(signal.SIGTERM)
        self._killer = asyncio.get_running_loop().call_at(kill_at, self._kill_stubborn, grace_s)

    def ask(self, request: AgentToRank) -> None:
        """Ask something of every rank that speaks to us."""
        for channel in self._channels.values():
            channel.ask(request)

    def pid_of(self, rank: int) -> int | None:
        """A rank's own process: the one that speaks to us, which a launcher may have started, or else ours."""
        pulse = self._pulses.get(rank)
        if pulse is not None:
            return None if pulse.over else pulse.pid
        return next((process.pid for process in self.processes if process.rank == rank and process.running), None)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.stop(number)
            if number is not signal.SIGKILL:
                process.signal(signal.SIGCONT, group=True)

    def _kill_stubborn(self, grace_s: float) -> None:
        """The grace is over: kill what is left, and say who has not used it."""
        stubborn = [process for process in self.processes if process.running]
        if stubborn:
            ranks = ", ".join(str(process.rank) for process in stubborn)
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

    def _hear(self, rank: int, message: RankToAgent) -> None:
        match message:
            case Hello():
                self._pulses[rank] = _Pulse(message.pid, self._clock.lead_s(message.clock) or 0.0)
            case Step():
                pulse = self._pulses[rank]
                pulse.step, pulse.at, pulse.hung = message.step, time.monotonic(), False
                pulse.words.append(_on_our_clock(message, pulse.ahead_s))
                self._gather()
                self._on_step(rank, message.step)
            case Checkpointed():
                self._say_progress()  # the step comes before its checkpoint
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
            case Found():
                self._found(message.finding)

    def _part(self, rank: int) -> None:
        """A rank hung up: it has nothing more to say, so its silence means nothing."""
        self._pulses[rank].over = True

    def _gather(self) -> None:
        """Move the steps that every rank of this node has passed into what is to be said."""
        if len(self._pulses) < self._expected:
            return
        pulses = [pulse for _, pulse in sorted(self._pulses.items())]
        whole = min(pulse.step for pulse in pulses)
        while (first := pulses[0].words[:1]) and first[0].step <= whole:
            words = [self._word(pulse, first[0].step) for pulse in pulses]
            self._passed.append(_together([word for word in words if word is not None], head=0 in self._pulses))
        if self._passed and self._flush is None:
            wait_s = max(0.0, self._said_at + self._order.progress_s - time.monotonic())
            self._flush = asyncio.get_running_loop().call_later(wait_s, self._say_progress)

    def _word(self, pulse: _Pulse, step: int) -> Step | None:
        """Take a rank's word for a step, and any for earlier ones, off its list."""
        while pulse.words and pulse.words[0].step <= step:
            word = pulse.words.pop(0)
            if word.step == step:
                return word
        return None

    def _say_progress(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if not self._passed:
            return
        self._said_at = time.monotonic()
        passed, self._passed = self._passed, []
        for first in range(0, len(passed), STEPS_TOGETHER):
            steps = tuple(passed[first : first + STEPS_TOGETHER])
            self._say(Progress(node=self._node, replica=self.replica, attempt=self.attempt, steps=steps))

    # How ranks end

    def _ended(self, process: RankProcess) -> None:
        self._ends.add(asyncio.ensure_future(self._tell_end(process)))

    async def _tell_end(self, process: RankProcess) -> None:
        """Say how a rank ended, after all that it has said itself."""
        ended = process.ended
        assert ended is not None
        await self._channels[process.rank].hear_out(LAST_WORDS_S)
        self._say_progress()
        pulse = self._pulses.get(process.rank)
        if pulse is not None:
            pulse.over = True
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
                log=ended.log,
                last_step=pulse.step if pulse else -1,
                said_hello=pulse is not None,
            )
        )
        self._ended_ranks += 1
        if self._ended_ranks == len(self.processes):
            self._clear_away()

    def _clear_away(self) -> None:
        """All ranks have ended: end what they left behind, then say that nothing is left."""
        if self._watch is not None:
            self._watch.cancel()
        for report in self._reports:
            report.cancel()
        if self._killer is not None:
            self._killer.cancel()
        for channel in self._channels.values():
            channel.close()
        ranks = [process.pid for process in self.processes if process.pid]
        leftovers = Leftovers(replica=self.replica, attempt=self.attempt, ranks=ranks)
        if ranks and all(process.ended_well for process in self.processes):
            finding = leftovers.finding(f"node{self._node}")
            if finding is not None:
                self._found(finding)
        if left := leftovers.end():
            log.error("processes %s outlive SIGKILL; the kernel holds them", left)
        for process in self.processes:
            process.clear_away()
            self._retention.release(Path(process.launch.log))
        self._port.renew()
        self._say(
            RanksStopped(
                at=self._clock(), node=self._node, replica=self.replica, attempt=self.attempt, port=self._port.number
            )
        )
        self._on_stopped(self)

    # Hangs

    async def _watch_for_hangs(self, deadline_s: float) -> None:
        """Report each rank that speaks to us and passes no step in time, once a silence."""
        while True:
            now = time.monotonic()
            due: list[int] = []
            next_at = now + deadline_s
            for rank, pulse in self._pulses.items():
                if pulse.hung or pulse.over:
                    continue
                allowed_s = deadline_s if pulse.step >= 0 else deadline_s * FIRST_STEP_FACTOR
                if now >= pulse.at + allowed_s:
                    due.append(rank)
                else:
                    next_at = min(next_at, pulse.at + allowed_s)
            for rank in due:
                # Each on its own: taking stacks takes seconds, and another rank's deadline may be milliseconds away.
                self._pulses[rank].hung = True
                report = asyncio.ensure_future(self._report_hang(rank))
                self._reports.add(report)
                report.add_done_callback(self._reports.discard)
            await asyncio.sleep(max(0.0, next_at - time.monotonic()) + 0.001)

    async def _report_hang(self, rank: int) -> None:
        """Look at a silent rank and say what is seen, unless it went on or ended meanwhile."""
        pulse = self._pulses[rank]
        waited_s = time.monotonic() - pulse.at
        last_step_at = self._clock() - waited_s
        state = state_letter(pulse.pid)
        into = self._folder / f"stacks-attempt-{self.attempt}-rank-{rank}.txt"
        stacks = await take(pulse.pid, into, stopped=state == "T")
        if pulse.over or not pulse.hung:
            return
        self._say(
            RankHung(
                at=self._clock(),
                node=self._node,
                replica=self.replica,
                attempt=self.attempt,
                rank=rank,
                last_step=pulse.step,
                last_step_at=last_step_at,
                waited_s=waited_s,
                process_state=state,
                stacks=stacks.path,
                innermost=stacks.innermost,
            )
        )


def _on_our_clock(step: Step, ahead_s: float) -> Step:
    return msgspec.structs.replace(step, started=step.started - ahead_s, ended=step.ended - ahead_s)


def _together(words: list[Step], *, head: bool) -> StepPassed:
    """A step that all ranks of the node have passed: the latest times, and what their metrics come to."""
    metrics = together(words[0].metrics, [word.metrics for word in words[1:]])
    return StepPassed(
        step=words[0].step,
        started=max(word.started for word in words),
        ended=max(word.ended for word in words),
        checkpoint_s=max(word.checkpoint_s for word in words),
        metrics=metrics if head else shared(metrics),
    )
