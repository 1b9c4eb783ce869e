"""Owns how an agent breaks something of its node on request: one function a row of job/drills.py, each drill done once.

A drill of a rank waits until the rank has a process; all others are announced first, because what does the announcing
may be what breaks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.agent.link import Link
from holdfast.agent.team import Team
from holdfast.clock import Clock, skew
from holdfast.events import DrillAction, DrillDone, DrillTarget
from holdfast.events.orders import Break
from holdfast.host.processes import descendants, pause, send

log = logging.getLogger("holdfast.agent")

FAREWELL_S = 1.0
"""Longest a drill waits for its own announcement to be safe."""


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
            if due and (order.target is not DrillTarget.RANK or order.rank == rank):
                self._do(order, step)

    def _do(self, order: Break, step: int) -> None:
        on_rank = order.target is DrillTarget.RANK
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
                target=f"rank {order.rank}" if on_rank else order.target.value,
                action=order.action.value,
                step=step,
            )
        )
        if not on_rank:
            work = asyncio.ensure_future(self._after(announced, act, order))
            self._work.add(work)
            work.add_done_callback(self._work.discard)

    async def _after(self, announced: int, act: Callable[[Reach, Break], None], order: Break) -> None:
        await self._reach.link.safe(announced, FAREWELL_S)
        act(self._reach, order)


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


def _skew_agent(_reach: Reach, order: Break) -> None:
    skew(order.amount or 0.0)


def _exhaust_memory(_reach: Reach, _order: Break) -> None:
    subprocess.Popen([sys.executable, "-m", "holdfast.agent.hoard"], stdin=subprocess.DEVNULL, start_new_session=True)


_ACTS: Mapping[tuple[DrillAction, DrillTarget], Callable[[Reach, Break], None]] = {
    (DrillAction.KILL, DrillTarget.RANK): _kill_rank,
    (DrillAction.STOP, DrillTarget.RANK): _stop_rank,
    (DrillAction.KILL, DrillTarget.NODE): _kill_node,
    (DrillAction.LOSE, DrillTarget.NODE): _kill_node,
    (DrillAction.STOP, DrillTarget.NODE): _stop_node,
    (DrillAction.KILL, DrillTarget.AGENT): _kill_agent,
    (DrillAction.STOP, DrillTarget.AGENT): _stop_agent,
    (DrillAction.SKEW, DrillTarget.AGENT): _skew_agent,
    (DrillAction.EXHAUST, DrillTarget.MEMORY): _exhaust_memory,
}

ROWS = frozenset(_ACTS)
"""The rows of job/drills.py that agents carry out."""
