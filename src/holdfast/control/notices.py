"""Notifies ranks of other replicas, and the user, of replicas that stop and start: from one comparison of two states.

The machine compares the states before and after each handler.
"""

from __future__ import annotations

from holdfast.control.context import Context
from holdfast.control.policy import quorum_finding
from holdfast.control.state import ReplicaPhase, ReplicaState, State
from holdfast.job.spec import Job
from holdfast.protocol.orders import AnnounceReplicaDown, AnnounceReplicaStarting


def announce_changes(ctx: Context, before: State) -> None:
    """Announce the replicas that have stopped or started since `before`, and a lost or restored quorum."""
    after = ctx.state
    if after.replicas is before.replicas or not before.has_replicas:
        return
    for was, now in zip(before.replicas, after.replicas, strict=True):
        if was is now:
            continue
        starts = now.attempt > was.attempt
        # Ranks that leave notify the others themselves.
        stops = not starts and ReplicaPhase.STOPPING in (was.phase, now.phase)
        if stops and before.may_step(was) and not after.may_step(now):
            _send_to_others(ctx, now, AnnounceReplicaDown(replica=now.replica, attempt=now.attempt))
        elif starts and now.attempt > 0:
            _send_to_others(ctx, now, AnnounceReplicaStarting(replica=now.replica, attempt=now.attempt))
        if starts or (stops and was.is_running and not now.exit_requested):
            _report_quorum(ctx, before)


def has_quorum(job: Job, state: State) -> bool:
    """Whether enough replicas run for steps to be committed; those that have finished are not missing."""
    finished = sum(replica.phase is ReplicaPhase.DONE for replica in state.replicas)
    return len(state.running_replicas) + finished >= job.recovery.min_replicas


def missed_announcements(ctx: Context, node: int) -> None:
    """Announce to a node what happened to other replicas while it was disconnected; its ranks may receive it twice."""
    for other in ctx.state.replicas:
        down = other.phase in (ReplicaPhase.STOPPING, ReplicaPhase.GATHERING) and not ctx.state.may_step(other)
        if other.attempt >= 0 and down:
            ctx.send(AnnounceReplicaDown(replica=other.replica, attempt=other.attempt), (node,))


def _send_to_others(ctx: Context, about: ReplicaState, order: AnnounceReplicaDown | AnnounceReplicaStarting) -> None:
    """Send an order to the nodes of other replicas whose ranks may take a step."""
    others = (other for other in ctx.state.replicas if other.replica != about.replica and ctx.state.may_step(other))
    if nodes := tuple(node for other in others for node in other.members):
        ctx.send(order, nodes)


def _report_quorum(ctx: Context, before: State) -> None:
    """Report a quorum that a failure has cost, and one regained after such a report: a planned exit needs neither."""
    state, least = ctx.state, ctx.job.recovery.min_replicas
    if state.ending or state.training_complete:
        return
    there = has_quorum(ctx.job, state)
    if there == state.quorum_lost and (there or has_quorum(ctx.job, before)):
        ctx.change(quorum_lost=not there)
        ctx.report(quorum_finding(len(state.running_replicas), len(state.replicas), least))
