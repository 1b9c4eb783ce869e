"""Handles rank events: they exit, stop, hang in large numbers, or commit a step."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from holdfast import events
from holdfast.control.context import Context, FollowUp
from holdfast.control.elastic import shorten_exit_timeout
from holdfast.control.hangs import await_reports, on_progress
from holdfast.control.node_handlers import fail_replica
from holdfast.control.node_set import RankSet, ranks_of
from holdfast.control.requests import inject_faults_due
from holdfast.control.rollout import settle_update
from holdfast.control.root_cause import exited_on_request, timed_out_waiting
from holdfast.control.state import ReplicaState, StepRate, Timer
from holdfast.job.spec import Job

STEP_RATE_WEIGHT = 0.1
"""Weight of the latest step in a replica's step rate."""


def rank_exited(ctx: Context, event: events.RankExited) -> None:
    """The attempt has failed, unless the rank succeeded, exited on request, or only gave up waiting for another."""
    replica = ctx.state.replicas[event.replica]
    if exited_on_request(replica, event):
        shorten_exit_timeout(ctx, event.replica)
    elif event.failed:
        replica = _add_failure(ctx, event)
        if ctx.state.has_replicas or not timed_out_waiting(event):
            ctx.raise_(FollowUp.STOP, index=event.replica)
        else:
            of_process = RankSet.span(event.rank, ctx.job.local_world_size // ctx.job.processes_per_node)
            ctx.change_replica(event.replica, reported=replica.reported | of_process)
            await_reports(ctx, event.replica)
    elif event.stopped:
        reason = "its agent stopped its ranks, as it does when it was long without a controller"
        fail_replica(ctx, (ctx.state.nodes[event.node],), reason)
    else:
        ctx.change_replica(event.replica, succeeded=replica.succeeded.with_member(event.rank))


def rank_exited_in_stop(ctx: Context, event: events.RankExited) -> None:
    """The rank's end may be the cause of the failure; a replica that was draining takes no further step."""
    replica = ctx.change_replica(event.replica, draining=False)
    if exited_on_request(replica, event):
        shorten_exit_timeout(ctx, event.replica)
    elif event.failed:
        _add_failure(ctx, event)
    elif not event.stopped:
        ctx.change_replica(event.replica, succeeded=replica.succeeded.with_member(event.rank))


def _add_failure(ctx: Context, event: events.RankExited) -> ReplicaState:
    replica = ctx.state.replicas[event.replica]
    failure = _attributed_to_first_failed(ctx.job, replica, event)
    return ctx.change_replica(event.replica, rank_failures=(*replica.rank_failures, failure))


def _attributed_to_first_failed(job: Job, replica: ReplicaState, event: events.RankExited) -> events.RankExited:
    """Attribute a launcher's exit to the node of the rank it reports as first failed, if that rank exists."""
    place = event.first_failed_rank // job.local_world_size
    if event.first_failed_rank < 0:
        return event
    known = place < len(replica.members)
    node, culprit = (replica.members[place], event.first_failed_rank) if known else (event.node, -1)
    return msgspec.structs.replace(event, node=node, first_failed_rank=culprit)


def ranks_drained(ctx: Context, event: events.RanksDrained) -> None:
    """A preempted replica has taken its last step: the others need not wait for its end."""
    ctx.change_replica(event.replica, draining=False)


def ranks_stopped(ctx: Context, event: events.RanksStopped) -> None:
    """No rank is left on a node."""
    if ctx.state.nodes[event.node].has_processes:
        ctx.change_node(event.node, has_processes=False, port=event.port)
        ctx.raise_(FollowUp.ADVANCE, index=event.replica)


def nodes_stopped(ctx: Context, event: events.NodesStopped) -> None:
    """No rank is left on many nodes."""
    stopped = (
        (ctx.state.nodes[node], port) for node, port in zip(events.from_ranges(event.nodes), event.ports, strict=True)
    )
    ctx.state = ctx.state.with_nodes(
        replace(node, has_processes=False, port=port) for node, port in stopped if node.has_processes
    )
    ctx.raise_(FollowUp.ADVANCE, index=event.replica)


def ranks_exited(ctx: Context, event: events.RanksExited) -> None:
    """Many ranks exited: successfully, or after their attempt had failed."""
    if not event.failed and not event.stopped:
        succeeded = ctx.state.replicas[event.replica].succeeded
        ctx.change_replica(event.replica, succeeded=succeeded | ranks_of(event.ranks))


def ranks_exited_in_hang(ctx: Context, event: events.RanksExited) -> None:
    """Many ranks exited: successfully, or because they gave up waiting."""
    if event.failed and not event.stopped:
        ranks_hung(ctx, event)
    else:
        ranks_exited(ctx, event)


def ranks_hung(ctx: Context, event: events.RanksHung | events.RanksExited) -> None:
    """Many ranks report that they wait, which were not the first to hang."""
    ctx.change_replica(event.replica, reported=ctx.state.replicas[event.replica].reported | ranks_of(event.ranks))
    await_reports(ctx, event.replica)


def step_committed(ctx: Context, event: events.StepCommitted) -> None:
    """A replica that steps does not hang; faults in the controller may wait for the step, and code on trial."""
    replica = ctx.state.replicas[event.replica]
    current = event.attempt == replica.attempt
    steps = replica.attempt_steps + (event.steps if current else 0)
    if steps and not replica.has_stepped and not event.step_clock:
        took_s = event.ended - replica.started_at
        ctx.change(longest_first_step_s=max(ctx.state.longest_first_step_s, took_s))
        ctx.clear_timers(event.replica, Timer.FIRST_STEP)
    ctx.change_replica(
        event.replica,
        # The step clock counts from 1 in each attempt, and what an attempt repeats of the last is not known.
        highest_step=replica.highest_step if event.step_clock else max(replica.highest_step, event.step),
        attempt_steps=steps,
        step_rate=_updated_step_rate(replica.step_rate, event),
    )
    if current:
        on_progress(ctx, event)
    settle_update(ctx)
    inject_faults_due(ctx, event.step)


def _updated_step_rate(step_rate: StepRate, event: events.StepCommitted) -> StepRate:
    took_s = max(0.0, event.ended - event.started) / event.steps
    total, samples = event.metrics.get("total_steps"), event.metrics.get("global_batch")
    return StepRate(
        step_s=took_s
        if step_rate.step_s is None
        else step_rate.step_s + STEP_RATE_WEIGHT * (took_s - step_rate.step_s),
        total_steps=step_rate.total_steps if total is None else int(total),
        global_batch=None if samples is None else int(samples),
    )
