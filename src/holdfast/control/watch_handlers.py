"""Handles what is observed in running ranks and nodes: a finding, or the end of the attempt as if one had failed."""

from __future__ import annotations

from holdfast import events
from holdfast.control.context import Context, FollowUp
from holdfast.control.node_slots import mark_failed
from holdfast.control.policy import PROGRESS_STEPS, Failure, FailureKind, NodeBlame, node_blame
from holdfast.control.requests import sample_stacks
from holdfast.control.state import CheckPhase
from holdfast.diagnose.stack_rounds import ROUNDS
from holdfast.events import DeviceFault, NumericFault
from holdfast.findings import Finding
from holdfast.job.quarantine import Certainty
from holdfast.protocol.watch_levels import WatchLevel

TOLERATED_LINK_LOSSES, LINK_WINDOW_S = 2, 300.0
"""Times that an adapter of a node may lose its link in so many seconds: switches restart, and cables are moved."""


def numeric_fault_observed(ctx: Context, event: events.NumericFaultObserved) -> None:
    """Stop the replica if its weights are damaged, or at a spike if the job wants that; else report it once."""
    is_spike = event.fault is NumericFault.SPIKE
    if not event.damaged and not (is_spike and ctx.job.watch.spikes is WatchLevel.ACT):
        _report_once(ctx, event.replica, event.finding)
    else:  # the decision has the finding
        kind = FailureKind.SPIKED if is_spike else FailureKind.NUMBERS_DAMAGED
        tainted = tuple(step for step in ctx.state.replicas[event.replica].checkpoints if step >= event.step)
        _fail(ctx, event.replica, event, kind, rank=event.rank, is_origin=event.is_origin, tainted=tainted)


def device_fault_observed(ctx: Context, event: events.DeviceFaultObserved) -> None:
    """Replace a node whose device has failed, before its ranks fail; a link that may return is tolerated twice.

    A memory error that affects only one program ends its rank, if it has one.
    """
    node = ctx.state.nodes[event.node]
    if node.generation != event.generation or node.is_missing or node.check is CheckPhase.FAILED:
        return
    certain = node_blame(event.fault) is NodeBlame.CERTAIN
    if event.fault is DeviceFault.NIC_LINK_DOWN:
        losses = (*(at for at in node.link_losses if at > event.at - LINK_WINDOW_S), event.at)
        certain = len(losses) > TOLERATED_LINK_LOSSES
        ctx.change_node(event.node, link_losses=losses)
    if not certain or ctx.job.watch.device_faults is not WatchLevel.ACT or ctx.state.ending:
        if ctx.job.watch.device_faults is not WatchLevel.OFF:
            ctx.report(event.finding)
    elif node.has_processes and node.replica is not None:
        _fail(ctx, node.replica, event, FailureKind(event.fault.value))
    else:
        certainty = Certainty.CERTAIN if node_blame(event.fault) is NodeBlame.CERTAIN else Certainty.NAMED
        mark_failed(ctx, event.node, event.finding, certainty)
        ctx.raise_(FollowUp.LOSE_FAILED, index=event.node)


def traffic_stopped(ctx: Context, event: events.TrafficStopped) -> None:
    """Compare the stacks of the replica's ranks, once in an attempt: they may all wait for one."""
    index = ctx.state.nodes[event.node].replica
    if index is not None and _report_once(ctx, index, event.finding):
        sample_stacks(ctx, ctx.state.replicas[index], requested_at=event.at, rounds=ROUNDS)


def corruption_observed(ctx: Context, event: events.CorruptionObserved) -> None:
    """Stop the replica: its ranks have set aside the checkpoints that may hold wrong numbers.

    One that has received the state of the others continues, unless its node was wrong before.
    """
    node = ctx.state.nodes[event.node]
    before = [at for at in node.corruptions if at > event.at - ctx.job.recovery.suspect_window_s]
    ctx.change_node(event.node, corruptions=(*before, event.at))
    if event.continues and not before:
        return
    kind = FailureKind.CORRUPTED if event.certain else FailureKind.DIVERGED
    _fail(ctx, event.replica, event, kind, rank=event.rank)


def straggler_observed(ctx: Context, event: events.StragglerObserved) -> None:
    """Report a rank that is slower than the others, or replace its node if something can take its place immediately."""
    spare = ctx.state.has_replicas or bool(ctx.state.ready_standbys & ctx.state.ready_nodes)
    since = event.at - ctx.job.recovery.suspect_window_s
    earlier = [one for each in ctx.state.replicas for one in each.failures]
    replaced = any(one.kind is FailureKind.STRAGGLING and one.at > since for one in earlier)
    if ctx.job.watch.stragglers is WatchLevel.ACT and spare and not replaced:
        _fail(ctx, event.replica, event, FailureKind.STRAGGLING, rank=event.rank)
    else:
        ctx.report(event.finding)


def _fail(
    ctx: Context,
    index: int,
    event: events.DeviceFaultObserved
    | events.NumericFaultObserved
    | events.CorruptionObserved
    | events.StragglerObserved,
    kind: FailureKind,
    rank: int | None = None,
    *,
    is_origin: bool = True,
    tainted: tuple[int, ...] = (),
) -> None:
    """End the attempt of a replica, as if the rank or the node had failed with this evidence.

    The checkpoints of the `tainted` steps were taken too late to resume from.
    """
    replica = ctx.state.replicas[index]
    first, *rest = event.finding.evidence or (event.finding.what,)
    if tainted:
        rest.append(f"not resumed from, since taken later: checkpoints of steps {', '.join(map(str, tainted[:8]))}")
    failure = Failure(
        kind=kind,
        at=event.at,
        node=event.node,
        attempt=replica.attempt,
        replica=index,
        rank=rank,
        error=first,
        evidence=tuple(rest),
        step=replica.highest_step,
        made_progress=replica.attempt_steps >= PROGRESS_STEPS,
        has_session=replica.highest_step > 0,
        uptime_s=event.at - replica.started_at,
        confirmed=True,
        is_origin=is_origin,
        tainted_checkpoints=len(tainted),
    )
    ctx.change_replica(index, observed=(*replica.observed, failure))
    ctx.raise_(FollowUp.STOP, index=index)


def _report_once(ctx: Context, index: int, finding: Finding) -> bool:
    """Report a finding unless its code was reported in the attempt; returns whether it was not."""
    replica = ctx.state.replicas[index]
    is_new = finding.code not in replica.watched
    if is_new:
        ctx.change_replica(index, watched=replica.watched | {finding.code})
        ctx.report(finding)
    return is_new
