"""Handles user requests to all ranks, and faults: who injects each and when, and which machines a fault has cordoned.

job/fault_catalog.py lists the faults.
"""

from __future__ import annotations

import math

from holdfast import events
from holdfast.control.commands import Cordon, InjectFault, Uncordon
from holdfast.control.context import Context
from holdfast.control.state import ReplicaState
from holdfast.job.fault_catalog import FAULTS, Executor
from holdfast.protocol import orders

MIN_DUMP_INTERVAL_S, MAX_DUMP_INTERVAL_S = 2.0, 60.0
"""Bounds of the seconds between two of several dumps: py-spy takes half a second of a core for each rank."""

_IMITATIONS = frozenset(
    target.value for target in events.FaultTarget if target.is_device or target.is_number or target.is_phase
)


def checkpoint_requested(ctx: Context, event: events.CheckpointRequested) -> None:
    """Every rank takes a checkpoint."""
    ctx.send(orders.TakeCheckpoint(), None)


def profile_requested(ctx: Context, event: events.ProfileRequested) -> None:
    """Every rank profiles its steps."""
    ctx.send(orders.ProfileSteps(ranks=event.ranks, memory=event.memory), None)


def stack_dump_requested(ctx: Context, event: events.StackDumpRequested) -> None:
    """Every agent dumps the stacks of its ranks; several dumps are of ranks that run."""
    if event.rounds == 1:
        ctx.send(orders.DumpStacks(native=event.native), None)
        return
    for replica in ctx.state.running_replicas:
        if event.replica in (None, replica.replica):
            sample_stacks(ctx, replica, requested_at=event.at, rounds=event.rounds)


def sample_stacks(ctx: Context, replica: ReplicaState, *, requested_at: float, rounds: int) -> None:
    """Every agent of a replica dumps the stacks of its ranks several times."""
    interval_s = dump_interval_s(replica.step_rate.step_s)
    order = orders.DumpStacks(requested_at=requested_at, rounds=rounds, interval_s=interval_s)
    ctx.send(order, ctx.state.busy_nodes_of(replica.replica))


def dump_interval_s(step_s: float | None) -> float:
    """Seconds between two dumps: steps and the golden ratio of one, so that dumps are spread evenly over a step."""
    if not step_s:
        return MIN_DUMP_INTERVAL_S
    steps = math.ceil(MIN_DUMP_INTERVAL_S / step_s) + (math.sqrt(5) - 1) / 2
    return min(MAX_DUMP_INTERVAL_S, steps * step_s)


def fault_requested(ctx: Context, event: events.FaultRequested) -> None:
    """The fault's node receives it immediately, and again whenever it joins, until it is injected."""
    if event.action is events.FaultAction.RESTORE:
        _uncordon(ctx, event.index)
    elif event.at_step is None and _executor(event) is Executor.CONTROLLER:
        ctx.emit(InjectFault(fault=event))
    else:
        ctx.change(pending_faults=(*ctx.state.pending_faults, event))
        if (node := _target_node(ctx, event)) is not None:
            _send_fault(ctx, event, node)


def fault_injected(ctx: Context, event: events.FaultInjected) -> None:
    """A fault took effect; a node that is removed for good cordons its machine."""
    _mark_drilled(ctx, event)
    known = _drop_pending(ctx, tuple(fault for fault in ctx.state.pending_faults if fault.at == event.requested_at))
    if any(fault.action is events.FaultAction.REMOVE for fault in known):
        node_id = ctx.state.nodes[event.node].node_id
        ctx.change(cordoned=(*ctx.state.cordoned, node_id))
        ctx.emit(Cordon(node_id=node_id))


def _mark_drilled(ctx: Context, event: events.FaultInjected) -> None:
    """Until the attempt ends, no failure counts against the node, unless the drill imitates a failed device."""
    if event.node < 0 or event.target.partition(" ")[0] in _IMITATIONS:
        return
    if (replica := ctx.state.nodes[event.node].replica) is not None:
        drilled = ctx.state.replicas[replica].drilled
        ctx.change_replica(replica, drilled=drilled.with_member(event.node))


def inject_faults_due(ctx: Context, step: int) -> None:
    """Inject the controller's own faults that wait for a step."""
    own = (fault for fault in ctx.state.pending_faults if _executor(fault) is Executor.CONTROLLER)
    for fault in _drop_pending(ctx, tuple(fault for fault in own if step >= (fault.at_step or 0))):
        ctx.emit(InjectFault(fault=fault))


def send_pending_faults(ctx: Context, node: int) -> None:
    """Send a node that joins or starts ranks its faults."""
    for fault in ctx.state.pending_faults:
        if _target_node(ctx, fault) == node:
            _send_fault(ctx, fault, node)


def cordon_again(ctx: Context) -> None:
    """Cordon the cordoned machines, for a target that may not know them."""
    ctx.emit(*(Cordon(node_id=node_id) for node_id in ctx.state.cordoned))


def _drop_pending(ctx: Context, faults: tuple[events.FaultRequested, ...]) -> tuple[events.FaultRequested, ...]:
    if faults:
        ctx.change(pending_faults=tuple(fault for fault in ctx.state.pending_faults if fault not in faults))
    return faults


def _uncordon(ctx: Context, node: int) -> None:
    """Uncordon every machine that was lost under this node."""
    back = tuple(node_id for node_id in ctx.state.cordoned if node_id.node == node)
    ctx.change(cordoned=tuple(node_id for node_id in ctx.state.cordoned if node_id not in back))
    ctx.emit(*(Uncordon(node_id=node_id) for node_id in back))


def _executor(fault: events.FaultRequested) -> Executor:
    return FAULTS[fault.action, fault.target].executor


def _target_node(ctx: Context, fault: events.FaultRequested) -> int | None:
    """The node whose agent injects a fault; None if another process does, or the current attempt lacks the rank."""
    if _executor(fault) is not Executor.AGENT:
        return None
    if fault.target.is_rank:
        replica, rank = divmod(fault.index, ctx.job.replica_world_size)
        return ctx.state.node_at(replica, rank // ctx.job.local_world_size)
    return fault.index


def _send_fault(ctx: Context, fault: events.FaultRequested, node: int) -> None:
    order = orders.InjectFault(
        requested_at=fault.at,
        target=fault.target,
        rank=fault.index % ctx.job.replica_world_size,
        index=fault.index,
        action=fault.action,
        at_step=fault.at_step,
        for_s=fault.for_s,
        amount=fault.amount,
    )
    ctx.send(order, (node,))
