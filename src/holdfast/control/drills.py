"""Owns the faults that people ask for: who carries each out and when, and which machines are out of use because of one.

What there is to ask for is in job/drills.py.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.commands import Commands, Cordon, Inject, Uncordon
from holdfast.control.state import State, Transition
from holdfast.events import DrillAction, DrillDone, DrillRequested
from holdfast.job.drills import DRILLS, Doer
from holdfast.job.spec import Job


def requested(job: Job, state: State, event: DrillRequested) -> Transition:
    """Somebody wants a fault: its node is told at once, and again whenever it joins, until it was done."""
    if event.action is DrillAction.RETURN:
        return _returned(state, event.index)
    if event.at_step is None and _by(event) is Doer.CONTROLLER:
        return state, (Inject(drill=event, node=None),)
    state = replace(state, drills=(*state.drills, event))
    node = _node_of(job, state, event)
    return state, (Inject(drill=event, node=node),) if node is not None else ()


def done(job: Job, state: State, event: DrillDone) -> Transition:
    """A fault took effect; a node that is lost for good takes its machine with it."""
    known = tuple(drill for drill in state.drills if drill.at == event.requested_at)
    state = replace(state, drills=tuple(drill for drill in state.drills if drill not in known))
    if not any(drill.action is DrillAction.LOSE for drill in known):
        return state, ()
    state = replace(state, cordoned=(*state.cordoned, state.nodes[event.node].place))
    return state, cordons(state)[-1:]


def due(job: Job, state: State, step: int) -> tuple[DrillRequested, ...]:
    """Faults of the controller's own that waited for a step."""
    own = (drill for drill in state.drills if _by(drill) is Doer.CONTROLLER)
    return tuple(drill for drill in own if step >= (drill.at_step or 0))


def pending(job: Job, state: State, node: int) -> Commands:
    """Faults that a node, which joins or starts ranks, is to be told of."""
    return tuple(Inject(drill=drill, node=node) for drill in state.drills if _node_of(job, state, drill) == node)


def cordons(state: State) -> Commands:
    """Machines that are out of use, for a back end that may not know."""
    return tuple(Cordon(place=place) for place in state.cordoned)


def _returned(state: State, node: int) -> Transition:
    """Every machine that was lost under this node is of use again."""
    back = tuple(place for place in state.cordoned if place.node == node)
    kept = tuple(place for place in state.cordoned if place.node != node)
    return replace(state, cordoned=kept), tuple(Uncordon(place=place) for place in back)


def _by(drill: DrillRequested) -> Doer:
    return DRILLS[drill.action, drill.target].by


def _node_of(job: Job, state: State, drill: DrillRequested) -> int | None:
    """The node whose agent carries a drill out; none where another does, or the attempt in hand has not the rank."""
    if _by(drill) is not Doer.AGENT:
        return None
    if drill.target.of_rank:
        replica, rank = divmod(drill.index, job.replica_world_size)
        return state.holder(replica, rank // job.local_world_size)
    return drill.index
