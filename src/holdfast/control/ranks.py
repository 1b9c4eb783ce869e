"""Owns what follows from the word of ranks: they end, have ended, hang in great number, or commit a step."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from holdfast.control.blame import gave_up, left_as_asked
from holdfast.control.commands import Inject
from holdfast.control.course import halt, judge_soon, parted, proceed
from holdfast.control.drills import due
from holdfast.control.growth import hurry
from holdfast.control.hangs import begun, goes_on
from holdfast.control.nodes import fail
from holdfast.control.state import Pace, ReplicaPhase, ReplicaState, State, Transition
from holdfast.control.updates import settle
from holdfast.events import (
    NodesStopped,
    RankExited,
    RanksExited,
    RanksHung,
    RanksLeaving,
    RanksStopped,
    Spans,
    StepCommitted,
    numbers,
)
from holdfast.job.spec import Job

NEWEST_STEP = 0.1
"""How much the latest step counts in a replica's pace."""


def rank_exited(job: Job, state: State, event: RankExited) -> Transition:
    """A rank ended: the others go on without its replica, if that was leaving."""
    replica = state.replicas[event.replica]
    if event.attempt != replica.attempt or replica.phase in (ReplicaPhase.GATHERING, ReplicaPhase.DONE):
        return state, ()
    state, told = parted(state, event.replica)
    state, commands = _ended(job, state, event)
    return state, (*told, *commands)


def _ended(job: Job, state: State, event: RankExited) -> Transition:
    """It did by itself and well, or its attempt has failed."""
    replica = state.replicas[event.replica]
    if left_as_asked(replica, event):
        return hurry(state, event.replica, event.at), ()
    if event.failed:
        replica = replace(replica, exits=(*replica.exits, _on_its_node(job, replica, event)))
        if state.several or not gave_up(event) or replica.phase is ReplicaPhase.STOPPING:
            return halt(job, state.with_replica(replica), event.replica, event.at)
        of_process = (1 << job.local_world_size // job.processes_per_node) - 1
        state = state.with_replica(replace(replica, heard=replica.heard | of_process << event.rank))
        return judge_soon(job, state, event.replica, event.at)
    if not event.stopped:
        return state.with_replica(replace(replica, well=replica.well | 1 << event.rank)), ()
    if replica.phase is ReplicaPhase.STOPPING:
        return state, ()
    reason = "its agent stopped its ranks, as it does when it was long without a controller"
    return fail(job, state, (state.nodes[event.node],), event.at, reason)


def _on_its_node(job: Job, replica: ReplicaState, event: RankExited) -> RankExited:
    """A launcher's end, as one on the node of the rank that it names; a word that cannot be true is no word."""
    place = event.culprit // job.local_world_size
    if event.culprit < 0:
        return event
    known = place < len(replica.members)
    node, culprit = (replica.members[place], event.culprit) if known else (event.node, -1)
    return msgspec.structs.replace(event, node=node, culprit=culprit)


def ranks_leaving(job: Job, state: State, event: RanksLeaving) -> Transition:
    """A replica whose node is taken away has taken its last step: the others need not wait for its end."""
    return parted(state, event.replica) if event.attempt == state.replicas[event.replica].attempt else (state, ())


def ranks_stopped(job: Job, state: State, event: RanksStopped) -> Transition:
    """A node is quiet."""
    node = state.nodes[event.node]
    replica = state.replicas[event.replica]
    if event.attempt != replica.attempt or not node.busy:
        return state, ()
    state = state.with_node(node.but(busy=False, port=event.port))
    return proceed(job, state, event.replica, event.at)


def nodes_stopped(job: Job, state: State, event: NodesStopped) -> Transition:
    """Many nodes are quiet."""
    if event.attempt != state.replicas[event.replica].attempt:
        return state, ()
    held = ((state.nodes[node], port) for node, port in zip(numbers(event.nodes), event.ports, strict=True))
    state = state.with_nodes(node.but(busy=False, port=port) for node, port in held if node.busy)
    return proceed(job, state, event.replica, event.at)


def ranks_exited(job: Job, state: State, event: RanksExited) -> Transition:
    """Many ranks ended: well, because they gave up waiting, or after their attempt had failed."""
    replica = state.replicas[event.replica]
    if event.attempt != replica.attempt or replica.phase is ReplicaPhase.GATHERING or event.stopped:
        return state, ()
    if event.failed:
        return _heard(job, state, replica, event)
    return state.with_replica(replace(replica, well=replica.well | _bits(event.ranks))), ()


def ranks_hung(job: Job, state: State, event: RanksHung) -> Transition:
    """Many ranks hang, and others before them."""
    replica = state.replicas[event.replica]
    return _heard(job, state, replica, event) if event.attempt == replica.attempt else (state, ())


def _heard(job: Job, state: State, replica: ReplicaState, event: RanksHung | RanksExited) -> Transition:
    if replica.phase is not ReplicaPhase.JUDGING:
        return state, ()
    state = state.with_replica(replace(replica, heard=replica.heard | _bits(event.ranks)))
    return judge_soon(job, state, event.replica, event.at)


def _bits(spans: Spans) -> int:
    return sum((1 << last + 1) - (1 << first) for first, last in spans)


def step_committed(job: Job, state: State, event: StepCommitted) -> Transition:
    """A replica is a step further; drills of the controller wait for that."""
    replica = state.replicas[event.replica]
    pace = _paced(replica.pace, event)
    steps = replica.steps + (event.steps if event.attempt == replica.attempt else 0)
    state = state.with_replica(replace(replica, step=max(replica.step, event.step), steps=steps, pace=pace))
    if steps and not replica.stepped:
        state = begun(state, event)
    if state.several and event.attempt == replica.attempt:
        state = goes_on(state, event)
    if drills := due(job, state, event.step):
        state = replace(state, drills=tuple(drill for drill in state.drills if drill not in drills))
    state, settled = settle(state, event.at)
    return state, (*settled, *(Inject(drill=drill, node=None) for drill in drills))


def _paced(pace: Pace, event: StepCommitted) -> Pace:
    took_s = max(0.0, event.ended - event.started) / event.steps
    total, samples = event.metrics.get("total_steps"), event.metrics.get("global_batch")
    return Pace(
        step_s=took_s if pace.step_s is None else pace.step_s + NEWEST_STEP * (took_s - pace.step_s),
        total_steps=pace.total_steps if total is None else int(total),
        global_batch=None if samples is None else int(samples),
    )
