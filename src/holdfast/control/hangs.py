"""Owns what follows from ranks that pass no step: who holds up whom, in one replica and among several.

In a hang everybody waits, and the one to blame differs only in its stack. One replica restarts whole, so it is only
waited until all have spoken. Of several only the one to blame is expelled, and at once where its word leaves no doubt:
it is stopped by a signal, or is anywhere but in a wait for its peers, or all its ranks wait, and none of them for
another replica. Those that wait for it go on when it is gone.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.blame import Suspicion, stands_apart, suspicion, waits_for_replicas, waits_within
from holdfast.control.course import enough, halt, judge_soon, look
from holdfast.control.state import Deadline, ReplicaPhase, ReplicaState, State, Transition
from holdfast.events import RankHung, StepCommitted
from holdfast.job.patience import EARLY_MORE_S, EARLY_STEPS, Patience
from holdfast.job.spec import Job


def rank_hung(job: Job, state: State, event: RankHung) -> Transition:
    """Wait for the other ranks' word, unless this one says enough."""
    replica = state.replicas[event.replica]
    if event.attempt != replica.attempt or not replica.at_work:
        return state, ()
    if state.several and not enough(job, state):
        return state, ()  # it waits for replicas that are lost
    heard = replica.heard | 1 << event.rank
    state = state.with_replica(replace(replica, heard=heard, hangs=(*replica.hangs, event)))
    if state.several and _says_enough(job, state, event):
        return _expel(job, state, event.replica, event.at)
    return judge_soon(job, state, event.replica, event.at)


def judged(job: Job, state: State, index: int, at: float) -> Transition:
    """Nobody will say more: the replica to blame is expelled; of several it may be another, or one that is gone."""
    if not state.several:
        return halt(job, state, index, at)
    if state.replicas[index].phase is not ReplicaPhase.JUDGING:
        return state, ()
    others = [replica for replica in state.replicas if replica.replica != index]
    if any(_holds_up(replica) for replica in others):
        return _pardoned(state, index), ()
    judging = [replica for replica in state.replicas if replica.phase is ReplicaPhase.JUDGING]
    suspect = min(judging, key=_suspicion)
    if _waits_for_one_that_compiles(job, state, suspect):
        return _pardoned(state, index), ()
    return _expel(job, state, suspect.replica, at)


def goes_on(state: State, event: StepCommitted) -> State:
    """A replica that has passed a step since it was reported does not hang."""
    replica = state.replicas[event.replica]
    if replica.phase is ReplicaPhase.JUDGING and event.ended > max(hung.at for hung in replica.hangs):
        return _pardoned(state, event.replica)
    return state


def begun(state: State, event: StepCommitted) -> State:
    """An attempt has taken its first step: so long may others take."""
    took_s = event.ended - state.replicas[event.replica].started_at
    state = replace(state, first_step_s=max(state.first_step_s, took_s))
    return state.with_deadline(Deadline.BEGIN.of(event.replica), None)


def not_begun(job: Job, state: State, index: int, at: float) -> Transition:
    """Those that have yet to open their Session are asked for, since no deadline of theirs watches them."""
    replica = state.replicas[index]
    busy = tuple(node for node in state.nodes_of(index) if node.busy)
    return (state, (look(replica, busy),)) if replica.phase is ReplicaPhase.RUNNING else (state, ())


def _expel(job: Job, state: State, index: int, at: float) -> Transition:
    """Stop a replica; others that were reported have waited for it."""
    for replica in state.replicas:
        if replica.phase is ReplicaPhase.JUDGING and replica.replica != index:
            state = _pardoned(state, replica.replica)
    return halt(job, state, index, at)


def _pardoned(state: State, index: int) -> State:
    replica = replace(state.replicas[index], phase=ReplicaPhase.RUNNING, heard=0, hangs=())
    return state.with_replica(replica).with_deadline(Deadline.JUDGE.of(index), None)


def _says_enough(job: Job, state: State, hung: RankHung) -> bool:
    """Whether what is heard of a replica shows that it holds up the others; that it is stopped says more than a stack.

    While another replica is on its way back, which keeps the cores busy, any other may be slow for a while.
    """
    replica = state.replicas[hung.replica]
    excused = any(_holds_up(other) for other in state.replicas if other is not replica)
    if excused and hung.waited_s < EARLY_MORE_S:
        return hung.process_state == "T"
    all_heard = (replica.heard | replica.well).bit_count() >= len(replica.members) * job.local_world_size
    return hung.process_state == "T" or stands_apart(hung) or (all_heard and all(map(waits_within, replica.hangs)))


def _holds_up(replica: ReplicaState) -> bool:
    """Whether others may rightly wait for a replica: it is on its way back, and has yet to commit its first step."""
    coming = replica.phase in (ReplicaPhase.STOPPING, ReplicaPhase.GATHERING)
    return coming or (replica.phase is ReplicaPhase.RUNNING and not replica.stepped)


def _waits_for_one_that_compiles(job: Job, state: State, suspect: ReplicaState) -> bool:
    """Whether it waits for a replica that may take longer in its early steps, of which its own agent will speak.

    No step takes that much longer than the longest.
    """
    longest_s = 2 * Patience(deadline_s=job.recovery.step_deadline_s or "auto").aside_s
    early = any(other.phase is ReplicaPhase.RUNNING and other.steps <= EARLY_STEPS for other in state.replicas)
    return early and all(waits_for_replicas(hung) and hung.waited_s < longest_s for hung in suspect.hangs)


def _suspicion(replica: ReplicaState) -> Suspicion:
    return min(map(suspicion, replica.hangs))
