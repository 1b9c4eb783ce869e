"""Handles rank events: they exit, stop, hang in large numbers, or commit a step."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from holdfast.control.commands import InjectFault
from holdfast.control.fault_requests import due_at_step
from holdfast.control.hangs import on_first_step, on_progress
from holdfast.control.lifecycle import advance, arm_hang_verdict, mark_departed, stop_replica
from holdfast.control.node_handlers import fail_replica
from holdfast.control.rollout import settle_update
from holdfast.control.root_cause import exited_on_request, timed_out_waiting
from holdfast.control.scale_up import shorten_exit_timeout
from holdfast.control.state import ReplicaPhase, ReplicaState, State, StepRate, Transition
from holdfast.events import (
    NodesStopped,
    Ranges,
    RankExited,
    RanksDrained,
    RanksExited,
    RanksHung,
    RanksStopped,
    StepCommitted,
    from_ranges,
)
from holdfast.job.spec import Job

STEP_RATE_WEIGHT = 0.1
"""Weight of the latest step in a replica's step rate."""


def rank_exited(job: Job, state: State, event: RankExited) -> Transition:
    """Handle a rank's exit: other replicas continue without its replica, if that was draining."""
    replica = state.replicas[event.replica]
    if event.attempt != replica.attempt or replica.phase in (ReplicaPhase.GATHERING, ReplicaPhase.DONE):
        return state, ()
    state, departed = mark_departed(state, event.replica)
    state, commands = _on_exit(job, state, event)
    return state, (*departed, *commands)


def _on_exit(job: Job, state: State, event: RankExited) -> Transition:
    """The rank exited successfully, or its attempt has failed."""
    replica = state.replicas[event.replica]
    if exited_on_request(replica, event):
        return shorten_exit_timeout(state, event.replica, event.at), ()
    if event.failed:
        replica = replace(
            replica, rank_failures=(*replica.rank_failures, _attributed_to_first_failed(job, replica, event))
        )
        if state.has_replicas or not timed_out_waiting(event) or replica.phase is ReplicaPhase.STOPPING:
            return stop_replica(job, state.with_replica(replica), event.replica, event.at)
        of_process = (1 << job.local_world_size // job.processes_per_node) - 1
        state = state.with_replica(replace(replica, reported=replica.reported | of_process << event.rank))
        return arm_hang_verdict(job, state, event.replica, event.at)
    if not event.stopped:
        return state.with_replica(replace(replica, succeeded=replica.succeeded | 1 << event.rank)), ()
    if replica.phase is ReplicaPhase.STOPPING:
        return state, ()
    reason = "its agent stopped its ranks, as it does when it was long without a controller"
    return fail_replica(job, state, (state.nodes[event.node],), event.at, reason)


def _attributed_to_first_failed(job: Job, replica: ReplicaState, event: RankExited) -> RankExited:
    """Attribute a launcher's exit to the node of the rank it reports as first failed, if that rank exists."""
    place = event.first_failed_rank // job.local_world_size
    if event.first_failed_rank < 0:
        return event
    known = place < len(replica.members)
    node, culprit = (replica.members[place], event.first_failed_rank) if known else (event.node, -1)
    return msgspec.structs.replace(event, node=node, first_failed_rank=culprit)


def ranks_drained(job: Job, state: State, event: RanksDrained) -> Transition:
    """Handle a preempted replica that has taken its last step: the others need not wait for its end."""
    return (
        mark_departed(state, event.replica) if event.attempt == state.replicas[event.replica].attempt else (state, ())
    )


def ranks_stopped(job: Job, state: State, event: RanksStopped) -> Transition:
    """Handle a node whose ranks have all stopped."""
    node = state.nodes[event.node]
    replica = state.replicas[event.replica]
    if event.attempt != replica.attempt or not node.has_processes:
        return state, ()
    state = state.with_node(node.with_changes(has_processes=False, port=event.port))
    return advance(job, state, event.replica, event.at)


def nodes_stopped(job: Job, state: State, event: NodesStopped) -> Transition:
    """Handle many nodes whose ranks have all stopped."""
    if event.attempt != state.replicas[event.replica].attempt:
        return state, ()
    stopped = ((state.nodes[node], port) for node, port in zip(from_ranges(event.nodes), event.ports, strict=True))
    state = state.with_nodes(
        node.with_changes(has_processes=False, port=port) for node, port in stopped if node.has_processes
    )
    return advance(job, state, event.replica, event.at)


def ranks_exited(job: Job, state: State, event: RanksExited) -> Transition:
    """Handle exits of many ranks: successful, or because they gave up waiting, or after their attempt had failed."""
    replica = state.replicas[event.replica]
    if event.attempt != replica.attempt or replica.phase is ReplicaPhase.GATHERING or event.stopped:
        return state, ()
    if event.failed:
        return _ranks_reported(job, state, replica, event)
    return state.with_replica(replace(replica, succeeded=replica.succeeded | _rank_bits(event.ranks))), ()


def ranks_hung(job: Job, state: State, event: RanksHung) -> Transition:
    """Handle many hung ranks, which were not the first to hang."""
    replica = state.replicas[event.replica]
    return _ranks_reported(job, state, replica, event) if event.attempt == replica.attempt else (state, ())


def _ranks_reported(job: Job, state: State, replica: ReplicaState, event: RanksHung | RanksExited) -> Transition:
    if replica.phase is not ReplicaPhase.HANG_SUSPECTED:
        return state, ()
    state = state.with_replica(replace(replica, reported=replica.reported | _rank_bits(event.ranks)))
    return arm_hang_verdict(job, state, event.replica, event.at)


def _rank_bits(spans: Ranges) -> int:
    return sum((1 << last + 1) - (1 << first) for first, last in spans)


def step_committed(job: Job, state: State, event: StepCommitted) -> Transition:
    """Handle a replica's committed step; faults in the controller may wait for it."""
    replica = state.replicas[event.replica]
    step_rate = _updated_step_rate(replica.step_rate, event)
    steps = replica.attempt_steps + (event.steps if event.attempt == replica.attempt else 0)
    state = state.with_replica(
        replace(replica, highest_step=max(replica.highest_step, event.step), attempt_steps=steps, step_rate=step_rate)
    )
    if steps and not replica.has_stepped:
        state = on_first_step(state, event)
    if state.has_replicas and event.attempt == replica.attempt:
        state = on_progress(state, event)
    if drills := due_at_step(job, state, event.step):
        state = replace(state, pending_faults=tuple(drill for drill in state.pending_faults if drill not in drills))
    state, settled = settle_update(state, event.at)
    return state, (*settled, *(InjectFault(fault=drill, node=None) for drill in drills))


def _updated_step_rate(step_rate: StepRate, event: StepCommitted) -> StepRate:
    took_s = max(0.0, event.ended - event.started) / event.steps
    total, samples = event.metrics.get("total_steps"), event.metrics.get("global_batch")
    return StepRate(
        step_s=took_s
        if step_rate.step_s is None
        else step_rate.step_s + STEP_RATE_WEIGHT * (took_s - step_rate.step_s),
        total_steps=step_rate.total_steps if total is None else int(total),
        global_batch=None if samples is None else int(samples),
    )
