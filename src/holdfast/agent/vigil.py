"""Owns the watch over an attempt's ranks on this node: how far each has come, and which has been silent for too long.

Only a rank that has said hello is watched by the clock: a program without a Session has nothing to say. One that has
not is looked at when another rank, here or elsewhere, waits in vain; and every one when another has given up waiting.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.agent.stacks import take
from holdfast.clock import Clock
from holdfast.events import AgentEvent, RankHung, StacksTaken
from holdfast.events.orders import StartRanks
from holdfast.events.rank import Doing
from holdfast.host.processes import identify, queued_s, state_letter
from holdfast.job.patience import AUTO_MORE_S, Patience

LOOK_AHEAD_S = AUTO_MORE_S
"""The stacks are taken so long before a deadline, and are there when it has passed: py-spy needs half a second, more
where cores are busy. It is all that `auto` adds, since hardly any step takes three times the 99th percentile."""

AUTO_STEPS = 512
"""Of so many latest steps the percentile is taken."""

QUEUE_LOOK_S = 0.25
"""Least time between two looks at how long a rank has waited for a CPU."""

TAKEN_AT_ONCE = 4
"""Most stacks that a node takes at a time for somebody who asks; py-spy needs most of a core."""

AGAIN_S = 15.0
"""Least time between two reports of one silence: the first may have been passed over because others were to blame."""


@dataclass
class Pulse:
    """What is known of a rank's steps."""

    pid: int
    ahead_s: float = 0.0
    """How far its clock is ahead of ours."""
    said_hello: bool = True
    step: int = -1
    at: float = field(default_factory=time.monotonic)
    """Monotonic seconds of its last word, or of its start where it has said none."""
    hung: bool = False
    reported_at: float = 0.0
    """Monotonic seconds of the latest report, where it hangs."""
    over: bool = False
    """Whether it has hung up or ended: it is silent for a reason."""
    leaving: bool = False
    """Whether it said that it ends because it was asked to."""
    doing: Doing = Doing.STEPS
    strayed: bool = False
    """Whether it was at something else since its last step, so that its next one does not show how long they take."""
    first_s: float = 0.0
    """Seconds that the attempt's first step took, since the rank's last word before it."""
    steps_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=AUTO_STEPS))
    """The same of each of the latest steps after it, but for those that it was at something else in."""
    queued_s: float = 0.0
    """Seconds that it had waited for a CPU when that was looked at last."""
    queue_seen_at: float = 0.0

    def passed(self, step: int) -> None:
        """It has finished a step, so it does not hang."""
        now = time.monotonic()
        if self.step < 0:
            self.first_s = now - self.at
        elif not self.strayed:
            self.steps_s.append(now - self.at)
        self.step, self.strayed = step, False
        self._speaks(Doing.STEPS, now)

    def turned(self, to: Doing) -> None:
        """It is at something else from now on."""
        self.strayed = True
        self._speaks(to, time.monotonic())

    def _speaks(self, doing: Doing, now: float) -> None:
        self.doing, self.at, self.hung = doing, now, False
        if now - self.queue_seen_at >= QUEUE_LOOK_S:
            self.queued_s, self.queue_seen_at = queued_s(self.pid), now

    def due(self, patience: Patience) -> float:
        """When it is to have spoken again, in monotonic seconds; when it is reported again, where it hangs."""
        if self.doing is Doing.REST:
            return math.inf
        ordinary = self.step >= 0 and self.doing is Doing.STEPS
        allowed_s = patience.step_s(self.first_s, self.steps_s) if ordinary else patience.aside_s
        if not self.hung:
            return self.at + allowed_s
        # Two that wait for each other are told by both having been seen to, within seconds of each other.
        soon = self.reported_at - self.at < 2 * allowed_s
        return self.reported_at + (AGAIN_S if soon else max(AGAIN_S, allowed_s))

    def starved_s(self) -> float:
        """Of the time since it spoke, seconds in which it was ready and the node's CPUs were at something else."""
        return max(0.0, queued_s(self.pid) - self.queued_s)


class Vigil:
    """Watches one attempt's ranks, and reports each that hangs; again, now and then, while it is silent."""

    def __init__(
        self, order: StartRanks, *, node: int, folder: Path, clock: Clock, say: Callable[[AgentEvent], int]
    ) -> None:
        self.pulses: dict[int, Pulse] = {}
        """Of ranks that have said hello."""
        self._mute: dict[int, Pulse] = {}
        """Of ranks that were looked at before they had."""
        self._order = order
        self._node = node
        self._folder = folder
        self._clock = clock
        self._say = say
        self._began = time.monotonic()
        self._watch: asyncio.Task[None] | None = None
        self._reports: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(TAKEN_AT_ONCE)

    def begin(self) -> None:
        """Watch from now on, if the job has a deadline for steps."""
        self._began = time.monotonic()
        if self._order.step_deadline_s is not None:
            self._watch = asyncio.ensure_future(self._watch_for_hangs(Patience(deadline_s=self._order.step_deadline_s)))

    def end(self) -> None:
        """Stop watching; reports under way are dropped."""
        for task in (self._watch, *self._reports):
            if task is not None:
                task.cancel()

    def hello(self, rank: int, pulse: Pulse) -> None:
        """A rank speaks, and is watched from now on."""
        if (mute := self._mute.pop(rank, None)) is not None:
            mute.over = True
        self.pulses[rank] = pulse

    def over(self, rank: int) -> None:
        """A rank hung up or ended: it has nothing more to say."""
        for pulses in (self.pulses, self._mute):
            if rank in pulses:
                pulses[rank].over = True

    def hung_up(self, rank: int) -> bool:
        """Whether a rank has spoken, and said all it had to say."""
        return rank in self.pulses and self.pulses[rank].over

    def left(self, ranks: Iterable[int]) -> bool:
        """Whether any of these ranks has said that it ends because it was asked to."""
        return any(self.pulses[rank].leaving for rank in ranks if rank in self.pulses)

    def at_work(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that have said hello, have not hung up, and live."""
        open_ones = ((rank, self.pulses[rank]) for rank in ranks if rank in self.pulses)
        return [rank for rank, pulse in open_ones if not pulse.over and identify(pulse.pid) is not None]

    def look(self, running: Mapping[int, int], *, everyone: bool) -> None:
        """Report those of these ranks (with their processes) that have yet to speak, or all of them, each once."""
        for rank, pid in running.items():
            if rank not in self.pulses and rank not in self._mute:
                self._mute[rank] = Pulse(pid, said_hello=False, at=self._began)
                self._report(rank, self._mute[rank])
            elif everyone and (pulse := self.pulses.get(rank)) is not None and not pulse.hung and not pulse.over:
                self._report(rank, pulse)

    def take_stacks(self, rank: int, pid: int) -> None:
        """Say where a rank stands: somebody has asked."""
        report = asyncio.ensure_future(self._say_where(rank, pid))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _say_where(self, rank: int, pid: int) -> None:
        state = state_letter(pid)
        replica, attempt = self._order.replica, self._order.attempt
        into = self._folder / f"stacks-asked-replica-{replica}-attempt-{attempt}-rank-{rank}.txt"
        async with self._turn:
            stacks = await take(pid, into, stopped=state == "T")
        self._say(
            StacksTaken(
                at=self._clock(),
                node=self._node,
                replica=replica,
                attempt=attempt,
                rank=rank,
                process_state=state,
                stacks=stacks.path,
                innermost=stacks.innermost,
            )
        )

    async def _watch_for_hangs(self, patience: Patience) -> None:
        ahead_s, look_s = (LOOK_AHEAD_S, AUTO_MORE_S) if patience.deadline_s == "auto" else (0.0, patience.deadline_s)
        while True:
            now = time.monotonic()
            next_at = now + look_s - ahead_s
            for rank, pulse in self.pulses.items():
                if pulse.over:
                    continue
                due = pulse.due(patience)
                if now >= due - ahead_s and now >= (due := due + pulse.starved_s()) - ahead_s:
                    self._report(rank, pulse, due)
                    due = pulse.due(patience)
                next_at = min(next_at, due - ahead_s)
            await asyncio.sleep(max(0.0, next_at - time.monotonic()) + 0.001)

    def _report(self, rank: int, pulse: Pulse, due: float = 0.0) -> None:
        """Each on its own: taking stacks takes seconds, and another rank's deadline may be milliseconds away."""
        pulse.hung, pulse.reported_at = True, time.monotonic()
        report = asyncio.ensure_future(self._report_hang(rank, pulse, due))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _report_hang(self, rank: int, pulse: Pulse, due: float) -> None:
        """Look at a silent rank and say what is seen once it is due, unless it went on or ended meanwhile."""
        spoke_at = pulse.at
        last_step_at = self._clock() - (time.monotonic() - spoke_at)
        state = state_letter(pulse.pid)
        into = self._folder / f"stacks-attempt-{self._order.attempt}-rank-{rank}.txt"
        stacks = await take(pulse.pid, into, stopped=state == "T")
        await self._come_due(pulse, due)
        if pulse.over or pulse.at != spoke_at:
            return
        self._say(
            RankHung(
                at=self._clock(),
                node=self._node,
                replica=self._order.replica,
                attempt=self._order.attempt,
                rank=rank,
                last_step=pulse.step,
                last_step_at=last_step_at,
                waited_s=time.monotonic() - spoke_at,
                process_state=state,
                stacks=stacks.path,
                innermost=stacks.innermost,
                said_hello=pulse.said_hello,
                commit_line=stacks.commit_line,
            )
        )

    async def _come_due(self, pulse: Pulse, due: float) -> None:
        """Time without a CPU puts it off, also while it is waited for."""
        while not pulse.over:
            left_s = due + pulse.starved_s() - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)
