"""Owns how an agent breaks something of its node on request: one function a row of job/fault_catalog.py, each drill done once.

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

from holdfast.agent.controller_connection import ControllerConnection
from holdfast.agent.worker_group import WorkerGroup
from holdfast.clock import Clock, shift_wall_clock
from holdfast.events import FaultAction, FaultInjected, FaultTarget
from holdfast.host.processes import HELPER, descendants, send_signal, stop_processes
from holdfast.protocol.orders import InjectFault
from holdfast.protocol.rank_messages import RankFault

log = logging.getLogger("holdfast.agent")

SLOWDOWN_CYCLE_S = 0.1
"""A slow node's ranks are let go and stopped again this often."""


@dataclass(frozen=True, kw_only=True)
class InjectionContext:
    """What drills may lay hands on."""

    node: int
    worker_groups: Callable[[], Iterable[WorkerGroup]]
    """The ranks there are at the moment."""
    controller: ControllerConnection
    clock: Clock

    def pid_of_rank(self, rank: int) -> int | None:
        """The process of a rank that is here and lives."""
        return next((pid for group in self.worker_groups() if (pid := group.pid_of(rank)) is not None), None)

    def all_rank_pids(self) -> list[int]:
        """The processes of all ranks that are here, and those below them."""
        own = [state.pid for group in self.worker_groups() for state in group.running]
        return [*own, *(pid for each in own for pid in descendants(each))]


InjectFunction = Callable[[InjectionContext, InjectFault], Coroutine[None, None, None] | None]
"""Carries a drill out; what it returns, if anything, goes on with it."""


class FaultInjector:
    """The drills this node was asked for, those included that wait for their step."""

    def __init__(self, context: InjectionContext) -> None:
        self._context = context
        self._requests: dict[float, InjectFault] = {}
        """By when they were asked for; one that was done has no step to wait for."""
        self._tasks: set[asyncio.Task[None]] = set()

    def schedule(self, order: InjectFault) -> None:
        """Do it, now or when its step has passed; one that was asked for before is left alone."""
        if order.requested_at in self._requests:
            return
        self._requests[order.requested_at] = order
        if order.at_step is None:
            self._inject(order, step=-1)

    def forget_pending(self) -> None:
        """Forget what is still to be done: in a new attempt a rank may be another node's, and the controller knows."""
        self._requests = {at: order for at, order in self._requests.items() if order.at_step is None}

    def on_step(self, rank: int, step: int) -> None:
        """A rank of this node has passed a step: do what waited for it."""
        for order in list(self._requests.values()):
            due = order.at_step is not None and step >= order.at_step
            if due and (not order.target.is_rank or order.rank == rank):
                self._inject(order, step)

    def _inject(self, order: InjectFault, step: int) -> None:
        on_rank = order.target.is_rank
        if on_rank and self._context.pid_of_rank(order.rank) is None:
            self._requests[order.requested_at] = msgspec.structs.replace(order, at_step=0)  # with its next step, then
            return
        self._requests[order.requested_at] = msgspec.structs.replace(order, at_step=None)
        inject = _INJECT_FUNCTIONS.get((order.action, order.target))
        if inject is None:
            log.error("this agent knows no drill to %s a %s", order.action, order.target)
            return
        if on_rank:
            inject(self._context, order)
        announced = self._context.controller.send(
            FaultInjected(
                at=self._context.clock(),
                node=self._context.node,
                requested_at=order.requested_at,
                target=f"{order.target} {order.index}" if on_rank else order.target.value,
                action=order.action.value,
                step=step,
            )
        )
        if not on_rank:
            task = asyncio.ensure_future(self._inject_once_acked(announced, inject, order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _inject_once_acked(self, announced: int, inject: InjectFunction, order: InjectFault) -> None:
        await self._context.controller.wait_acked(announced)
        if (lasting := inject(self._context, order)) is not None:
            await lasting


def _kill_rank(context: InjectionContext, order: InjectFault) -> None:
    if (pid := context.pid_of_rank(order.rank)) is not None:
        send_signal(pid, signal.SIGKILL)


def _stop_rank(context: InjectionContext, order: InjectFault) -> None:
    if (pid := context.pid_of_rank(order.rank)) is not None:
        stop_processes([pid], order.for_s)


def _kill_node(_context: InjectionContext, _order: InjectFault) -> None:
    for pid in [*descendants(os.getpid()), os.getpid()]:
        send_signal(pid, signal.SIGKILL)


def _stop_node(_context: InjectionContext, order: InjectFault) -> None:
    stop_processes([*descendants(os.getpid()), os.getpid()], order.for_s)


def _kill_agent(_context: InjectionContext, _order: InjectFault) -> None:
    send_signal(os.getpid(), signal.SIGKILL)


def _stop_agent(_context: InjectionContext, order: InjectFault) -> None:
    stop_processes([os.getpid()], order.for_s)


def _inject_in_session(context: InjectionContext, order: InjectFault) -> None:
    what = RankFault.COLLECTIVE if order.target is FaultTarget.COLLECTIVE else RankFault(order.action.value)
    for group in context.worker_groups():
        if group.pid_of(order.rank) is not None:
            group.inject(order.rank, what)


async def _slow_node(context: InjectionContext, order: InjectFault) -> None:
    """Let the node's ranks have one part of the time in so many."""
    times = order.amount or 1.0
    until = math.inf if order.for_s is None else time.monotonic() + order.for_s
    stopped: list[int] = []
    try:
        while time.monotonic() < until:
            stopped = context.all_rank_pids()
            stop_processes(stopped)
            await asyncio.sleep(SLOWDOWN_CYCLE_S * (1 - 1 / times))
            _resume(stopped)
            await asyncio.sleep(SLOWDOWN_CYCLE_S / times)
    finally:
        _resume(stopped)


def _resume(pids: Iterable[int]) -> None:
    for pid in pids:
        send_signal(pid, signal.SIGCONT)


def _shift_agent_clock(_context: InjectionContext, order: InjectFault) -> None:
    shift_wall_clock(order.amount or 0.0)


def _exhaust_memory(_context: InjectionContext, _order: InjectFault) -> None:
    argv = [sys.executable, "-m", "holdfast.agent.memory_hog"]
    subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | {HELPER: "1"})


_INJECT_FUNCTIONS: Mapping[tuple[FaultAction, FaultTarget], InjectFunction] = {
    (FaultAction.KILL, FaultTarget.RANK): _kill_rank,
    (FaultAction.STOP, FaultTarget.RANK): _stop_rank,
    (FaultAction.KILL, FaultTarget.NODE): _kill_node,
    (FaultAction.REMOVE, FaultTarget.NODE): _kill_node,
    (FaultAction.STOP, FaultTarget.NODE): _stop_node,
    (FaultAction.KILL, FaultTarget.AGENT): _kill_agent,
    (FaultAction.STOP, FaultTarget.AGENT): _stop_agent,
    (FaultAction.CLOCK_SKEW, FaultTarget.AGENT): _shift_agent_clock,
    (FaultAction.EXHAUST, FaultTarget.MEMORY): _exhaust_memory,
    (FaultAction.RAISE, FaultTarget.RANK): _inject_in_session,
    (FaultAction.HANG, FaultTarget.RANK): _inject_in_session,
    (FaultAction.HANG, FaultTarget.COLLECTIVE): _inject_in_session,
    (FaultAction.SLOW, FaultTarget.NODE): _slow_node,
}

SUPPORTED_FAULTS = frozenset(_INJECT_FUNCTIONS)
"""The rows of job/fault_catalog.py that agents carry out."""
