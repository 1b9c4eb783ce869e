"""Owns what follows from what people ask for: an end, a fault, a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.commands import Checkpoint, Commands, Inject
from holdfast.control.course import end
from holdfast.control.state import Ending, State, Transition
from holdfast.errors import ExitCode
from holdfast.events import CancelRequested, CheckpointRequested, DrillDone, DrillRequested, DrillTarget, Outcome
from holdfast.job.drills import DRILLS, Doer
from holdfast.job.spec import Job


def cancel(job: Job, state: State, event: CancelRequested) -> Transition:
    """Somebody wants the run to end; a second wish with `force` takes its grace away."""
    if state.ending and not event.force:
        return state, ()
    grace_s = 0.0 if event.force else job.recovery.stop_grace_s
    asked = Ending(outcome=Outcome.CANCELLED, exit_code=ExitCode.CANCELLED, reason="cancelled on request")
    return end(job, state, replace(state.ending or asked, grace_s=grace_s), event.at)


def drill(job: Job, state: State, event: DrillRequested) -> Transition:
    """Somebody wants a fault: its node is told at once, and again whenever it joins, until it was done."""
    node = _drilled_node(job, event)
    if node is None and event.at_step is None:
        return state, (Inject(drill=event, node=None),)
    state = replace(state, drills=(*state.drills, event))
    return state, (Inject(drill=event, node=node),) if node is not None else ()


def drill_done(job: Job, state: State, event: DrillDone) -> Transition:
    """A fault took effect."""
    return replace(state, drills=tuple(drill for drill in state.drills if drill.at != event.requested_at)), ()


def _drilled_node(job: Job, drill: DrillRequested) -> int | None:
    """The node whose agent carries a drill out; None where the controller does."""
    if DRILLS[drill.action, drill.target].by is Doer.CONTROLLER:
        return None
    return drill.index // job.local_world_size if drill.target is DrillTarget.RANK else drill.index


def due_drills(job: Job, state: State, step: int) -> tuple[DrillRequested, ...]:
    """Faults of the controller's own that waited for a step."""
    return tuple(drill for drill in state.drills if _drilled_node(job, drill) is None and step >= (drill.at_step or 0))


def pending_drills(job: Job, state: State, node: int) -> Commands:
    """Faults that a node that joins is to be told of."""
    return tuple(Inject(drill=drill, node=node) for drill in state.drills if _drilled_node(job, drill) == node)


def checkpoint(job: Job, state: State, event: CheckpointRequested) -> Transition:
    """Somebody wants a checkpoint."""
    return state, (Checkpoint(),)
