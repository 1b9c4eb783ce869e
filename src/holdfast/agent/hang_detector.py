"""Detects hung ranks on one node and tracks their steps.

Only a rank with a Session or a step clock has deadlines: any other reports no steps. Ranks that have not connected yet
are inspected when another rank, on any node, keeps waiting; all ranks are inspected when another has given up waiting.
With `auto` and one replica, a silent rank is reported only if its process does nothing (process_use.py): it may
evaluate or save, while the others wait for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec import Struct, field

from holdfast.agent.flight_dump import FlightRecorders, RankCollectives
from holdfast.agent.process_use import ProcessUse, Silence, classify_silence, is_busy, process_use
from holdfast.agent.stack_dump import StackDump, dump_native_stacks, dump_stacks, stacks_name
from holdfast.agent.stack_sampler import MAX_CONCURRENT_DUMPS, requested_stacks_name
from holdfast.clock import Clock
from holdfast.events import AgentEvent, RankHung, StacksDumped
from holdfast.host.processes import cpu_wait_s, identify, state_letter
from holdfast.host.system_calls import system_call
from holdfast.job.step_timeouts import AUTO_MARGIN_S, StepTimeouts
from holdfast.protocol.orders import StartRanks
from holdfast.protocol.rank_messages import Activity

DUMP_AHEAD_S = AUTO_MARGIN_S
"""Seconds before a deadline at which stacks are dumped, so that they are ready when it expires.

py-spy needs half a second, more when cores are busy. This margin is all that `auto` adds, since hardly any step takes
three times the 99th percentile.
"""

POLL_S = 0.2
"""Seconds between two looks at the deadlines with `auto`: a rank whose steps begin has a nearer one than before."""

LOOK_S = 1.0
"""Seconds between two looks with a fixed step timeout."""

AUTO_TIMEOUT_STEPS = 512
"""Number of latest steps from which the percentile is computed."""

CPU_WAIT_POLL_S = 0.25
"""Least seconds between two readings of a rank's CPU wait time."""

MIN_REPORT_INTERVAL_S = 15.0
"""Least seconds between two reports of one hang: the controller may have ignored the first, blaming other ranks."""

USE_WINDOW_S = 0.3
"""Seconds for which a silent process is watched before its stacks are dumped."""

MIN_RECHECK_S, MAX_RECHECK_S = 2.0, 60.0
"""Seconds after which a rank that was at work is checked again: half of those that it has been silent, in these bounds.
"""

IDLE_FACTOR, MIN_IDLE_S = 10.0, 60.0
"""Without a Session, a rank that is idle outside a collective is reported after this factor times its longest step, and
these seconds: it may wait for a server, as in an upload or an evaluation elsewhere."""


class RankProgress(Struct):
    """Progress of one rank."""

    pid: int
    clock_ahead_s: float = 0.0
    """Offset of the rank's clock from ours, in seconds."""
    has_session: bool = True
    """Whether it has a Session; if not, it has a step clock, or has not connected."""
    step: int = -1
    last_message_at: float = field(default_factory=time.monotonic)
    """Monotonic time of its last message, or of its start if it has sent none."""
    hung: bool = False
    reported_at: float = 0.0
    """Monotonic time of the latest report, if it hangs."""
    recheck_at: float = 0.0
    """Monotonic time before which a rank that was at work is not checked again."""
    first_use: ProcessUse | None = None
    """What its process had used when it was first checked since its last message."""
    closed: bool = False
    """Whether the rank has disconnected or exited, so its silence is expected."""
    exits_on_request: bool = False
    """Whether it reported that it exits on request."""
    activity: Activity = Activity.STEPPING
    interrupted: bool = False
    """Whether it did something else since its last step, so that the next step's duration does not count."""
    first_step_s: float = 0.0
    """Duration of the attempt's first step in seconds, since the rank's previous message."""
    longest_step_s: float = 0.0
    """Longest duration of a step in this attempt, after the first."""
    step_durations_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=AUTO_TIMEOUT_STEPS))
    """Durations of the latest steps after the first, in seconds, without interrupted ones."""
    cpu_wait_s: float = 0.0
    """Seconds that it had waited for a CPU at the last poll."""
    cpu_wait_polled_at: float = 0.0
    stopped_since: float | None = None
    """Monotonic time at which its process was first seen stopped, as by SIGSTOP; None while it is not."""

    def on_step(self, step: int, at: float | None = None) -> None:
        """Record a step that finished now, or at this monotonic time; it clears a hang."""
        now = time.monotonic() if at is None else at
        took_s = now - self.last_message_at
        if self.step < 0:
            self.first_step_s = took_s
        elif not self.interrupted:
            self.step_durations_s.append(took_s)
            self.longest_step_s = max(self.longest_step_s, took_s)
        self.step, self.interrupted = step, False
        self._on_message(Activity.STEPPING, now)

    def set_activity(self, to: Activity) -> None:
        """Record that the rank starts another activity."""
        self.interrupted = True
        self._on_message(to, time.monotonic())

    def _on_message(self, activity: Activity, now: float) -> None:
        self.activity, self.last_message_at, self.hung = activity, now, False
        self.recheck_at, self.first_use = 0.0, None
        if now - self.cpu_wait_polled_at >= CPU_WAIT_POLL_S:
            self.cpu_wait_s, self.cpu_wait_polled_at = cpu_wait_s(self.pid), now

    @property
    def _in_step(self) -> bool:
        """Whether it computes a step, and not an attempt's first."""
        return self.step >= 0 and self.activity is Activity.STEPPING

    def look(self, now: float) -> None:
        """See whether its process is stopped outside of a step."""
        is_stopped = not self._in_step and state_letter(self.pid) == "T"
        self.stopped_since = (self.stopped_since or now) if is_stopped else None

    def deadline(self, timeouts: StepTimeouts) -> float:
        """Monotonic time by which its next message is due; for a hung rank, the time of the next report.

        A stopped process neither saves nor evaluates: between steps too it gets no longer than a step.
        """
        if self.activity is Activity.FINISHED:
            return math.inf
        is_limited = self._in_step or self.stopped_since is not None
        allowed_s = timeouts.step_s(self.first_step_s, self.step_durations_s) if is_limited else timeouts.non_step_s
        if not self.hung:
            return max(max(self.last_message_at, self.stopped_since or 0.0) + allowed_s, self.recheck_at)
        # When two ranks wait for each other, the reports of both must arrive within seconds of each other.
        soon = self.reported_at - self.last_message_at < 2 * allowed_s
        return self.reported_at + (MIN_REPORT_INTERVAL_S if soon else max(MIN_REPORT_INTERVAL_S, allowed_s))

    def postpone(self, now: float, silence: Silence) -> None:
        """The rank may be at work: check it again later."""
        silent_s = now - self.last_message_at
        self.hung = False
        self.recheck_at = now + min(MAX_RECHECK_S, max(MIN_RECHECK_S, silent_s / 2))
        if silence is Silence.IDLE:
            self.recheck_at = max(now + MIN_RECHECK_S, self.last_message_at + self.idle_limit_s)

    @property
    def idle_limit_s(self) -> float:
        """Seconds after which it is reported if it is idle outside a collective."""
        return 0.0 if self.has_session else max(MIN_IDLE_S, IDLE_FACTOR * self.longest_step_s)

    def cpu_starved_s(self) -> float:
        """Seconds since its last message in which the rank was runnable but waited for a CPU."""
        return max(0.0, cpu_wait_s(self.pid) - self.cpu_wait_s)


class HangDetector:
    """Watches the ranks of one attempt and reports each that hangs, repeatedly while it stays silent."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        folder: Path,
        recorders: FlightRecorders,
        clock: Clock,
        send: Callable[[AgentEvent], int],
    ) -> None:
        self.progress: dict[int, RankProgress] = {}
        """Ranks that have sent a hello."""
        self._without_session: dict[int, RankProgress] = {}
        """Ranks that were inspected before their hello."""
        self._order = order
        self._node = node
        self._folder = folder
        self._recorders = recorders
        self._clock = clock
        self._send = send
        self._started_at = time.monotonic()
        self._needs_evidence = order.step_timeout_s == "auto" and order.replica_count == 1
        """Whether a rank is reported only if its process does nothing."""
        self._watch_task: asyncio.Task[None] | None = None
        self._report_tasks: set[asyncio.Task[None]] = set()
        self._dump_slots = asyncio.Semaphore(MAX_CONCURRENT_DUMPS)

    def start(self) -> None:
        """Start watching, if the job sets a step timeout."""
        self._started_at = time.monotonic()
        if self._order.step_timeout_s is not None:
            self._watch_task = asyncio.ensure_future(
                self._watch_for_hangs(StepTimeouts(step_timeout_s=self._order.step_timeout_s))
            )

    def stop(self) -> None:
        """Stop watching and drop pending reports."""
        for task in (self._watch_task, *self._report_tasks):
            if task is not None:
                task.cancel()

    def add_rank(self, rank: int, progress: RankProgress) -> None:
        """A rank has connected: watch it from now on."""
        if (previous := self._without_session.pop(rank, None)) is not None:
            previous.closed = True
        self.progress[rank] = progress

    def mark_closed(self, rank: int) -> None:
        """A rank has disconnected or exited."""
        for progress_by_rank in (self.progress, self._without_session):
            if rank in progress_by_rank:
                progress_by_rank[rank].closed = True

    def has_closed(self, rank: int) -> bool:
        """Whether a rank had connected and has since disconnected or exited."""
        return rank in self.progress and self.progress[rank].closed

    def exited_on_request(self, ranks: Iterable[int]) -> bool:
        """Whether any of these ranks has reported that it exits on request."""
        return any(self.progress[rank].exits_on_request for rank in ranks if rank in self.progress)

    def running_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that have sent a hello, are still connected, and run."""
        open_ones = ((rank, self.progress[rank]) for rank in ranks if rank in self.progress)
        return [rank for rank, progress in open_ones if not progress.closed and identify(progress.pid) is not None]

    def report_silent(self, running: Mapping[int, int], *, all_ranks: bool) -> None:
        """Report the ranks in `running` (rank to pid) that have not connected yet, or all of them, once each."""
        for rank, pid in running.items():
            unknown = self._without_session.get(rank)
            if rank not in self.progress and (unknown is None or not unknown.hung):
                self._without_session[rank] = RankProgress(pid, has_session=False, last_message_at=self._started_at)
                self._start_report(rank, self._without_session[rank], forced=all_ranks)
            elif (
                all_ranks
                and (progress := self.progress.get(rank)) is not None
                and not progress.hung
                and not progress.closed
            ):
                self._start_report(rank, progress, forced=True)

    def dump_stacks(self, rank: int, pid: int, *, native: bool = False) -> None:
        """Dump a rank's stacks and send them, on a user's request."""
        report = asyncio.ensure_future(self._send_stacks(rank, pid, native=native))
        self._report_tasks.add(report)
        report.add_done_callback(self._report_tasks.discard)

    async def _send_stacks(self, rank: int, pid: int, *, native: bool) -> None:
        state = state_letter(pid)
        replica, attempt = self._order.replica, self._order.attempt
        into = self._folder / requested_stacks_name(replica, attempt, rank)
        async with self._dump_slots:
            stacks, shown = await self._dump(rank, pid, state, into, native=native)
        self._send(
            StacksDumped(
                at=self._clock(),
                node=self._node,
                replica=replica,
                attempt=attempt,
                rank=rank,
                process_state=state,
                stacks=stacks.path,
                top_frame=stacks.top_frame,
                frames=stacks.frames,
                flight_dumps=shown.files,
                collectives=shown.collectives,
                native=stacks.native,
                native_missing=stacks.native_missing,
            )
        )

    async def _dump(
        self, rank: int, pid: int, state: str, into: Path, *, native: bool = False
    ) -> tuple[StackDump, RankCollectives]:
        """Dump a rank's stacks and flight recorders; a stopped process has only stacks."""
        dump = dump_native_stacks if native else dump_stacks
        if state == "T":
            return await dump(pid, into, stopped=True), RankCollectives()
        return await asyncio.gather(dump(pid, into), self._recorders.dump(rank))

    async def _watch_for_hangs(self, timeouts: StepTimeouts) -> None:
        fixed_s = timeouts.step_timeout_s
        ahead_s, poll_s = (DUMP_AHEAD_S, POLL_S) if fixed_s == "auto" else (0.0, min(LOOK_S, fixed_s))
        while True:
            now = time.monotonic()
            next_at = now + poll_s
            for rank, progress in self.progress.items():
                if progress.closed:
                    continue
                progress.look(now)
                due = progress.deadline(timeouts)
                if now >= due - ahead_s and now >= (due := due + progress.cpu_starved_s()) - ahead_s:
                    self._start_report(rank, progress, due)
                    due = progress.deadline(timeouts)
                next_at = min(next_at, due - ahead_s)
            await asyncio.sleep(max(0.0, next_at - time.monotonic()) + 0.001)

    def _start_report(self, rank: int, progress: RankProgress, due: float = 0.0, *, forced: bool = False) -> None:
        """Report in a task per rank: dumping takes seconds, and another rank's deadline may be milliseconds away.

        `forced`: whatever its process does, since another rank gave up waiting.
        """
        progress.hung, progress.reported_at = True, time.monotonic()
        needs_evidence = self._needs_evidence and not forced
        report = asyncio.ensure_future(self._report_hang(rank, progress, due, needs_evidence=needs_evidence))
        self._report_tasks.add(report)
        report.add_done_callback(self._report_tasks.discard)

    async def _report_hang(
        self, rank: int, progress: RankProgress, due: float, *, needs_evidence: bool = False
    ) -> None:
        """Dump the stacks and flight recorders of a silent rank, and report it unless it has resumed or exited.

        The report waits for the deadline. If it `needs_evidence`, a rank that may be at work is checked again later.
        """
        last_message_at = progress.last_message_at
        last_step_at = self._clock() - (time.monotonic() - last_message_at)
        busy = needs_evidence and await self._is_busy(progress)
        state = state_letter(progress.pid)
        into = self._folder / stacks_name(self._order.replica, self._order.attempt, rank)
        if busy and state != "T":  # its stacks matter only if it waits for a GPU
            stacks, shown = StackDump(), await self._recorders.dump(rank)
        else:
            stacks, shown = await self._dump(rank, progress.pid, state, into)
        await self._wait_due(progress, due)
        if progress.closed or progress.last_message_at != last_message_at:
            return
        if progress.stopped_since is not None and state_letter(progress.pid) != "T":
            progress.hung = False  # it continues with work that may last longer than a step
            return
        silence = classify_silence(state=state, busy=busy, top_frame=stacks.top_frame, collectives=shown.collectives)
        silent_s = time.monotonic() - last_message_at
        idle = silence is Silence.IDLE and progress.step >= 0 and silent_s < progress.idle_limit_s
        if needs_evidence and (silence is Silence.BUSY or idle):
            progress.postpone(time.monotonic(), silence)
            return
        self._send(
            RankHung(
                at=self._clock(),
                node=self._node,
                replica=self._order.replica,
                attempt=self._order.attempt,
                rank=rank,
                last_step=progress.step,
                last_step_at=last_step_at,
                waited_s=time.monotonic() - last_message_at,
                process_state=state,
                system_call=await asyncio.to_thread(system_call, progress.pid),
                stacks=stacks.path,
                top_frame=stacks.top_frame,
                frames=stacks.frames,
                has_session=progress.has_session,
                commit_line=stacks.commit_line,
                flight_dumps=shown.files,
                collectives=shown.collectives,
                waits_for_peers=silence is Silence.WAITING_FOR_PEERS,
                unless_others_work=needs_evidence and silence is not Silence.STOPPED,
            )
        )

    async def _is_busy(self, progress: RankProgress) -> bool:
        """Whether a rank's process is busy: now, or on average since the first check in this silence."""
        before = await asyncio.to_thread(process_use, progress.pid)
        await asyncio.sleep(USE_WINDOW_S)
        after = await asyncio.to_thread(process_use, progress.pid)
        if progress.first_use is None:
            progress.first_use = before
        return is_busy(before, after) or is_busy(progress.first_use, after)

    async def _wait_due(self, progress: RankProgress, due: float) -> None:
        """Wait until the deadline, which time without a CPU postpones."""
        while not progress.closed:
            left_s = due + progress.cpu_starved_s() - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)
