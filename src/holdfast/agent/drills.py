"""Owns how an agent breaks something of its node on request: one function a row of job/drills.py, each drill done once.

A drill of a rank waits until the rank has a process; all others are announced first, because what does the announcing
may be what breaks. They are done when their controller has written that down, however long it is away: one that it had
never heard of it would have the next agent do again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.agent.link import Link
from holdfast.agent.team import Team
from holdfast.clock import Clock, skew
from holdfast.events import DrillAction, DrillDone, DrillTarget
from holdfast.events.orders import Break
from holdfast.events.rank import Misfortune
from holdfast.host.processes import HELPER, descendants, pause, send

log = logging.getLogger("holdfast.agent")

SLOW_CYCLE_S = 0.1
"""A slow node's ranks are let go and stopped again this often."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What drills may lay hands on."""

    node: int
    teams: Callable[[], Iterable[Team]]
    """The ranks there are at the moment."""
    link: Link
    clock: Clock

    def rank(self, rank: int) -> int | None:
        """The process of a rank that is here and lives."""
        return next((pid for team in self.teams() if (pid := team.pid_of(rank)) is not None), None)

    def ranks(self) -> list[int]:
        """The processes of all ranks that are here, and those below them."""
        own = [state.pid for team in self.teams() for state in team.running]
        return [*own, *(pid for each in own for pid in descendants(each))]


Act = Callable[[Reach, Break], Coroutine[None, None, None] | None]
"""Carries a drill out; what it returns, if anything, goes on with it."""


class Drills:
    """The drills this node was asked for, those included that wait for their step."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._known: dict[float, Break] = {}
        """By when they were asked for; one that was done has no step to wait for."""
        self._work: set[asyncio.Task[None]] = set()

    def take(self, order: Break) -> None:
        """Do it, now or when its step has passed; one that was asked for before is left alone."""
        if order.requested_at in self._known:
            return
        self._known[order.requested_at] = order
        if order.at_step is None:
            self._do(order, step=-1)

    def begin_anew(self) -> None:
        """Forget what is still to be done: in a new attempt a rank may be another node's, and the controller knows."""
        self._known = {at: order for at, order in self._known.items() if order.at_step is None}

    def step_passed(self, rank: int, step: int) -> None:
        """A rank of this node has passed a step: do what waited for it."""
        for order in list(self._known.values()):
            due = order.at_step is not None and step >= order.at_step
            if due and (not order.target.of_rank or order.rank == rank):
                self._do(order, step)

    def _do(self, order: Break, step: int) -> None:
        on_rank = order.target.of_rank
        if on_rank and self._reach.rank(order.rank) is None:
            self._known[order.requested_at] = msgspec.structs.replace(order, at_step=0)  # with its next step, then
            return
        self._known[order.requested_at] = msgspec.structs.replace(order, at_step=None)
        act = _ACTS.get((order.action, order.target))
        if act is None:
            log.error("this agent knows no drill to %s a %s", order.action, order.target)
            return
        if on_rank:
            act(self._reach, order)
        announced = self._reach.link.say(
            DrillDone(
                at=self._reach.clock(),
                node=self._reach.node,
                requested_at=order.requested_at,
                target=f"{order.target} {order.index}" if on_rank else order.target.value,
                action=order.action.value,
                step=step,
            )
        )
        if not on_rank:
            work = asyncio.ensure_future(self._after(announced, act, order))
            self._work.add(work)
            work.add_done_callback(self._work.discard)

    async def _after(self, announced: int, act: Act, order: Break) -> None:
        await self._reach.link.safe(announced)
        if (lasting := act(self._reach, order)) is not None:
            await lasting


def _kill_rank(reach: Reach, order: Break) -> None:
    if (pid := reach.rank(order.rank)) is not None:
        send(pid, signal.SIGKILL)


def _stop_rank(reach: Reach, order: Break) -> None:
    if (pid := reach.rank(order.rank)) is not None:
        pause([pid], order.for_s)


def _kill_node(_reach: Reach, _order: Break) -> None:
    for pid in [*descendants(os.getpid()), os.getpid()]:
        send(pid, signal.SIGKILL)


def _stop_node(_reach: Reach, order: Break) -> None:
    pause([*descendants(os.getpid()), os.getpid()], order.for_s)


def _kill_agent(_reach: Reach, _order: Break) -> None:
    send(os.getpid(), signal.SIGKILL)


def _stop_agent(_reach: Reach, order: Break) -> None:
    pause([os.getpid()], order.for_s)


def _befall(reach: Reach, order: Break) -> None:
    what = Misfortune.COLLECTIVE if order.target is DrillTarget.COLLECTIVE else Misfortune(order.action.value)
    for team in reach.teams():
        if team.pid_of(order.rank) is not None:
            team.befall(order.rank, what)


async def _slow_node(reach: Reach, order: Break) -> None:
    """Let the node's ranks have one part of the time in so many."""
    times = order.amount or 1.0
    until = math.inf if order.for_s is None else time.monotonic() + order.for_s
    stopped: list[int] = []
    try:
        while time.monotonic() < until:
            stopped = reach.ranks()
            pause(stopped)
            await asyncio.sleep(SLOW_CYCLE_S * (1 - 1 / times))
            _let_go(stopped)
            await asyncio.sleep(SLOW_CYCLE_S / times)
    finally:
        _let_go(stopped)


def _let_go(pids: Iterable[int]) -> None:
    for pid in pids:
        send(pid, signal.SIGCONT)


def _skew_agent(_reach: Reach, order: Break) -> None:
    skew(order.amount or 0.0)


def _exhaust_memory(_reach: Reach, _order: Break) -> None:
    argv = [sys.executable, "-m", "holdfast.agent.hoard"]
    subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | {HELPER: "1"})


_ACTS: Mapping[tuple[DrillAction, DrillTarget], Act] = {
    (DrillAction.KILL, DrillTarget.RANK): _kill_rank,
    (DrillAction.STOP, DrillTarget.RANK): _stop_rank,
    (DrillAction.KILL, DrillTarget.NODE): _kill_node,
    (DrillAction.LOSE, DrillTarget.NODE): _kill_node,
    (DrillAction.STOP, DrillTarget.NODE): _stop_node,
    (DrillAction.KILL, DrillTarget.AGENT): _kill_agent,
    (DrillAction.STOP, DrillTarget.AGENT): _stop_agent,
    (DrillAction.SKEW, DrillTarget.AGENT): _skew_agent,
    (DrillAction.EXHAUST, DrillTarget.MEMORY): _exhaust_memory,
    (DrillAction.RAISE, DrillTarget.RANK): _befall,
    (DrillAction.HANG, DrillTarget.RANK): _befall,
    (DrillAction.HANG, DrillTarget.COLLECTIVE): _befall,
    (DrillAction.SLOW, DrillTarget.NODE): _slow_node,
}

ROWS = frozenset(_ACTS)
"""The rows of job/drills.py that agents carry out."""
