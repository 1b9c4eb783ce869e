"""Injects faults into a node on request: one function per row of job/fault_catalog.py, each fault once.

A fault of a rank waits until the rank has a process. All others are announced first, because they may break the
announcing process. Those run once the controller has logged the announcement, however long the controller is away.
Otherwise the next agent would inject the fault again.
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

import msgspec
from msgspec import Struct

from holdfast.agent.controller_connection import ControllerConnection
from holdfast.agent.device_drills import DEVICE_OUTPUTS, OVERLAYS
from holdfast.agent.node_monitors import NodeMonitors
from holdfast.agent.worker_group import WorkerGroup
from holdfast.clock import Clock, shift_wall_clock
from holdfast.events import FaultAction, FaultInjected, FaultTarget
from holdfast.host.processes import HELPER, descendants, send_signal, stop_processes
from holdfast.protocol.orders import InjectFault
from holdfast.protocol.rank_messages import InjectRankFault, RankFault

log = logging.getLogger("holdfast.agent")

SLOWDOWN_CYCLE_S = 0.1
"""Period in seconds at which a slow node's ranks are stopped and resumed."""


class InjectionContext(Struct, frozen=True, kw_only=True):
    """The objects that faults act on."""

    node: int
    worker_groups: Callable[[], Iterable[WorkerGroup]]
    """The current worker groups."""
    controller: ControllerConnection
    clock: Clock
    monitors: NodeMonitors

    def pid_of_rank(self, rank: int) -> int | None:
        """The pid of a rank that runs here."""
        return next((pid for group in self.worker_groups() if (pid := group.pid_of(rank)) is not None), None)

    def all_rank_pids(self) -> list[int]:
        """The pids of all ranks here and of their descendants."""
        own = [state.pid for group in self.worker_groups() for state in group.running]
        return [*own, *(pid for each in own for pid in descendants(each))]


InjectFunction = Callable[[InjectionContext, InjectFault], Coroutine[None, None, None] | None]
"""Injects a fault; a coroutine that it returns runs as a task."""


class FaultInjector:
    """The faults requested on this node, including those that wait for their step."""

    def __init__(self, context: InjectionContext) -> None:
        self._context = context
        self._requests: dict[float, InjectFault] = {}
        """Keyed by request time; an injected fault has no step to wait for."""
        self._tasks: set[asyncio.Task[None]] = set()

    def schedule(self, order: InjectFault) -> None:
        """Inject a fault now or after its step; ignore a duplicate request."""
        if order.requested_at in self._requests:
            return
        self._requests[order.requested_at] = order
        if order.at_step is None:
            self._inject(order, step=-1)

    def forget_pending(self) -> None:
        """Drop pending faults: a new attempt may place a rank on another node, and the controller still knows them."""
        self._requests = {at: order for at, order in self._requests.items() if order.at_step is None}

    def on_step(self, rank: int, step: int) -> None:
        """A rank of this node has finished a step: inject the faults that waited for it."""
        for order in list(self._requests.values()):
            due = order.at_step is not None and step >= order.at_step
            if due and (not order.target.is_rank or order.rank == rank):
                self._inject(order, step)

    def _inject(self, order: InjectFault, step: int) -> None:
        on_rank = order.target.is_rank
        if on_rank and self._context.pid_of_rank(order.rank) is None:
            self._requests[order.requested_at] = msgspec.structs.replace(order, at_step=0)  # retry at its next step
            return
        self._requests[order.requested_at] = msgspec.structs.replace(order, at_step=None)
        inject = INJECT_FUNCTIONS.get((order.action, order.target))
        if inject is None:
            log.error("this agent cannot inject the fault %s %s", order.action, order.target)
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


def _fail_device(context: InjectionContext, order: InjectFault) -> None:
    """Write what a rank writes whose device fails, and end it as torch does."""
    for group in context.worker_groups():
        if (pid := group.pid_of(order.rank)) is not None:
            group.write_output(order.rank, DEVICE_OUTPUTS[order.action, order.target].format(rank=order.rank))
            send_signal(pid, signal.SIGABRT)


def _change_readings(context: InjectionContext, order: InjectFault) -> None:
    """Let the monitors read a device as if something were wrong with it."""
    source, overlay = OVERLAYS[order.action, order.target]
    context.monitors.overlay(source, overlay(order.rank), math.inf if order.for_s is None else order.for_s)


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
    drill = InjectRankFault(fault=what, target=order.target.value, amount=order.amount, for_s=order.for_s)
    for group in context.worker_groups():
        if group.pid_of(order.rank) is not None:
            group.inject(order.rank, drill)


async def _slow_node(context: InjectionContext, order: InjectFault) -> None:
    """Slow the node's ranks down by the factor `amount`."""
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


INJECT_FUNCTIONS: Mapping[tuple[FaultAction, FaultTarget], InjectFunction] = {
    (FaultAction.KILL, FaultTarget.RANK): _kill_rank,
    (FaultAction.STOP, FaultTarget.RANK): _stop_rank,
    (FaultAction.KILL, FaultTarget.NODE): _kill_node,
    (FaultAction.REMOVE, FaultTarget.NODE): _kill_node,
    (FaultAction.STOP, FaultTarget.NODE): _stop_node,
    (FaultAction.KILL, FaultTarget.AGENT): _kill_agent,
    (FaultAction.STOP, FaultTarget.AGENT): _stop_agent,
    (FaultAction.CLOCK_SKEW, FaultTarget.AGENT): _shift_agent_clock,
    (FaultAction.OOM, FaultTarget.NODE): _exhaust_memory,
    (FaultAction.RAISE, FaultTarget.RANK): _inject_in_session,
    (FaultAction.NAN, FaultTarget.LOSS): _inject_in_session,
    (FaultAction.NAN, FaultTarget.GRADIENT): _inject_in_session,
    (FaultAction.SPIKE, FaultTarget.LOSS): _inject_in_session,
    (FaultAction.SPIKE, FaultTarget.GRADIENT): _inject_in_session,
    (FaultAction.BITFLIP, FaultTarget.WEIGHTS): _inject_in_session,
    (FaultAction.BITFLIP, FaultTarget.OPTIMIZER): _inject_in_session,
    (FaultAction.BITFLIP, FaultTarget.GRADIENT): _inject_in_session,
    (FaultAction.BITFLIP, FaultTarget.ACTIVATIONS): _inject_in_session,
    (FaultAction.HANG, FaultTarget.RANK): _inject_in_session,
    (FaultAction.HANG, FaultTarget.COLLECTIVE): _inject_in_session,
    (FaultAction.SLOW, FaultTarget.NODE): _slow_node,
    **{(FaultAction.SLOW, target): _inject_in_session for target in FaultTarget if target.is_phase},
    (FaultAction.DATA_STALL, FaultTarget.RANK): _inject_in_session,
    (FaultAction.LEAK, FaultTarget.RANK): _inject_in_session,
    **dict.fromkeys(DEVICE_OUTPUTS, _fail_device),
    **dict.fromkeys(OVERLAYS, _change_readings),
}
"""The rows of job/fault_catalog.py that agents can inject."""
