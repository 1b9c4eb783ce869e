"""Handles ranks that complete no step: finds the culprit in one replica or among several.

In a hang all ranks wait, and only the culprit's stack differs. A single replica restarts whole, so it only waits until
all ranks have reported. Of several replicas only the culprit is stopped, immediately if its report is conclusive: a
rank is stopped by a signal, or is anywhere but in a wait for its peers, or all its ranks wait, none of them for another
replica. The replicas that wait for it continue when it is gone.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.lifecycle import arm_hang_verdict, has_quorum, report_silent_command, stop_replica
from holdfast.control.root_cause import (
    HangSuspicion,
    hang_suspicion,
    is_not_waiting,
    waits_for_other_replicas,
    waits_inside_replica,
)
from holdfast.control.state import ReplicaPhase, ReplicaState, State, Timer, Transition
from holdfast.events import RankHung, StepCommitted
from holdfast.job.spec import Job
from holdfast.job.step_timeouts import EARLY_MARGIN_S, EARLY_STEPS, StepTimeouts


def rank_hung(job: Job, state: State, event: RankHung) -> Transition:
    """Wait for the reports of the other ranks, unless this one is conclusive."""
    replica = state.replicas[event.replica]
    if event.attempt != replica.attempt or not replica.is_running:
        return state, ()
    if state.has_replicas and not has_quorum(job, state):
        return state, ()  # it waits for lost replicas
    heard = replica.reported | 1 << event.rank
    state = state.with_replica(replace(replica, reported=heard, hangs=(*replica.hangs, event)))
    if state.has_replicas and _is_conclusive(job, state, event):
        return _stop_suspect(job, state, event.replica, event.at)
    return arm_hang_verdict(job, state, event.replica, event.at)


def on_hang_verdict(job: Job, state: State, index: int, at: float) -> Transition:
    """No more reports will arrive: stop the suspect; among several replicas it may be another, or one that is gone."""
    if not state.has_replicas:
        return stop_replica(job, state, index, at)
    if state.replicas[index].phase is not ReplicaPhase.HANG_SUSPECTED:
        return state, ()
    others = [replica for replica in state.replicas if replica.replica != index]
    if any(_is_recovering(replica) for replica in others):
        return _clear_suspicion(state, index), ()
    suspected = [replica for replica in state.replicas if replica.phase is ReplicaPhase.HANG_SUSPECTED]
    suspect = min(suspected, key=_suspicion)
    if _waits_for_compiling_replica(job, state, suspect):
        return _clear_suspicion(state, index), ()
    return _stop_suspect(job, state, suspect.replica, at)


def on_progress(state: State, event: StepCommitted) -> State:
    """A replica that has completed a step since the report does not hang."""
    replica = state.replicas[event.replica]
    if replica.phase is ReplicaPhase.HANG_SUSPECTED and event.ended > max(hung.at for hung in replica.hangs):
        return _clear_suspicion(state, event.replica)
    return state


def on_first_step(state: State, event: StepCommitted) -> State:
    """An attempt has completed its first step: other attempts get as much time."""
    took_s = event.ended - state.replicas[event.replica].started_at
    state = replace(state, longest_first_step_s=max(state.longest_first_step_s, took_s))
    return state.with_timer(Timer.FIRST_STEP.key(event.replica), None)


def on_first_step_timeout(job: Job, state: State, index: int, at: float) -> Transition:
    """Request reports from ranks that have yet to open their Session, since no step timeout watches them."""
    replica = state.replicas[index]
    busy = tuple(node for node in state.nodes_of(index) if node.has_processes)
    return (state, (report_silent_command(replica, busy),)) if replica.phase is ReplicaPhase.RUNNING else (state, ())


def _stop_suspect(job: Job, state: State, index: int, at: float) -> Transition:
    """Stop a replica; other suspected ones have been waiting for it."""
    for replica in state.replicas:
        if replica.phase is ReplicaPhase.HANG_SUSPECTED and replica.replica != index:
            state = _clear_suspicion(state, replica.replica)
    return stop_replica(job, state, index, at)


def _clear_suspicion(state: State, index: int) -> State:
    replica = replace(state.replicas[index], phase=ReplicaPhase.RUNNING, reported=0, hangs=())
    return state.with_replica(replica).with_timer(Timer.HANG_VERDICT.key(index), None)


def _is_conclusive(job: Job, state: State, hung: RankHung) -> bool:
    """Whether the reports show that a replica holds up the others; a stopped process is better evidence than a stack.

    While another replica recovers, which keeps the cores busy, any replica may be slow for a while.
    """
    replica = state.replicas[hung.replica]
    excused = any(_is_recovering(other) for other in state.replicas if other is not replica)
    if excused and hung.waited_s < EARLY_MARGIN_S:
        return hung.process_state == "T"
    all_heard = (replica.reported | replica.succeeded).bit_count() >= len(replica.members) * job.local_world_size
    return (
        hung.process_state == "T"
        or is_not_waiting(hung)
        or (all_heard and all(map(waits_inside_replica, replica.hangs)))
    )


def _is_recovering(replica: ReplicaState) -> bool:
    """Whether others may rightly wait for a replica: it is recovering, and has yet to commit its first step."""
    coming = replica.phase in (ReplicaPhase.STOPPING, ReplicaPhase.GATHERING)
    return coming or (replica.phase is ReplicaPhase.RUNNING and not replica.has_stepped)


def _waits_for_compiling_replica(job: Job, state: State, suspect: ReplicaState) -> bool:
    """Whether it waits for a replica that may take longer in its early steps, which that replica's agent reports.

    No step takes that much longer than the longest.
    """
    longest_s = 2 * StepTimeouts(step_timeout_s=job.recovery.step_timeout_s or "auto").non_step_s
    early = any(other.phase is ReplicaPhase.RUNNING and other.attempt_steps <= EARLY_STEPS for other in state.replicas)
    return early and all(waits_for_other_replicas(hung) and hung.waited_s < longest_s for hung in suspect.hangs)


def _suspicion(replica: ReplicaState) -> HangSuspicion:
    return min(map(hang_suspicion, replica.hangs))
