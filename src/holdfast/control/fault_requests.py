"""Schedules requested faults: who injects each and when, and which machines a fault has cordoned.

job/fault_catalog.py lists the faults.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.commands import Commands, Cordon, InjectFault, Uncordon
from holdfast.control.state import State, Transition
from holdfast.events import FaultAction, FaultInjected, FaultRequested
from holdfast.job.fault_catalog import FAULTS, Executor
from holdfast.job.spec import Job


def fault_requested(job: Job, state: State, event: FaultRequested) -> Transition:
    """Handle a fault request: its node receives it immediately, and again whenever it joins, until it is injected."""
    if event.action is FaultAction.RESTORE:
        return _machine_restored(state, event.index)
    if event.at_step is None and _executor(event) is Executor.CONTROLLER:
        return state, (InjectFault(fault=event, node=None),)
    state = replace(state, pending_faults=(*state.pending_faults, event))
    node = _target_node(job, state, event)
    return state, (InjectFault(fault=event, node=node),) if node is not None else ()


def fault_injected(job: Job, state: State, event: FaultInjected) -> Transition:
    """A fault took effect; a node that is removed for good cordons its machine."""
    known = tuple(fault for fault in state.pending_faults if fault.at == event.requested_at)
    state = replace(state, pending_faults=tuple(fault for fault in state.pending_faults if fault not in known))
    if not any(fault.action is FaultAction.REMOVE for fault in known):
        return state, ()
    state = replace(state, cordoned=(*state.cordoned, state.nodes[event.node].node_id))
    return state, cordon_commands(state)[-1:]


def due_at_step(job: Job, state: State, step: int) -> tuple[FaultRequested, ...]:
    """Faults in the controller that wait for a step."""
    own = (fault for fault in state.pending_faults if _executor(fault) is Executor.CONTROLLER)
    return tuple(fault for fault in own if step >= (fault.at_step or 0))


def pending_for_node(job: Job, state: State, node: int) -> Commands:
    """Faults to send to a node that joins or starts ranks."""
    return tuple(
        InjectFault(fault=fault, node=node) for fault in state.pending_faults if _target_node(job, state, fault) == node
    )


def cordon_commands(state: State) -> Commands:
    """Cordoned machines, for a back end that may not know them."""
    return tuple(Cordon(node_id=place) for place in state.cordoned)


def _machine_restored(state: State, node: int) -> Transition:
    """Uncordon every machine that was lost under this node."""
    back = tuple(place for place in state.cordoned if place.node == node)
    kept = tuple(place for place in state.cordoned if place.node != node)
    return replace(state, cordoned=kept), tuple(Uncordon(node_id=place) for place in back)


def _executor(fault: FaultRequested) -> Executor:
    return FAULTS[fault.action, fault.target].executor


def _target_node(job: Job, state: State, fault: FaultRequested) -> int | None:
    """The node whose agent injects a fault; None if another process does, or the current attempt lacks the rank."""
    if _executor(fault) is not Executor.AGENT:
        return None
    if fault.target.is_rank:
        replica, rank = divmod(fault.index, job.replica_world_size)
        return state.node_at(replica, rank // job.local_world_size)
    return fault.index
