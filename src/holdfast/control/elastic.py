"""Decides how many nodes an attempt starts with, how long it waits for more, and when it adds nodes that came later.

To add nodes, ranks checkpoint and exit, and more ranks start. No step is lost if ranks take a checkpoint on request.
Other ranks are stopped after their next checkpoint, or once `nodes.scale_up_timeout_s` is over. policy.py limits how
often a run may add nodes.
"""

from __future__ import annotations

from holdfast.control.context import Context, FollowUp
from holdfast.control.policy import EXIT_GRACE_S, scale_up_due
from holdfast.control.state import NodePhase, NodeState, ReplicaState, State, Timer
from holdfast.events import CheckpointCommitted, ScalingEffect, WorldSizeChanged
from holdfast.findings import Finding, Owner, Severity
from holdfast.job.spec import GlobalBatch, Job, LearningRate
from holdfast.protocol.orders import CheckpointAndExit

MAX_REASONS = 4
"""Maximum number of missing nodes whose reason is reported."""
REMEMBERED = 32
"""Checkpoints of a replica whose steps the state has."""


def min_nodes(job: Job, state: State) -> int:
    """Fewest nodes that a replica can run with."""
    return -(-job.nodes.min // len(state.replicas))


def select_members(job: Job, state: State, replica: ReplicaState) -> tuple[NodeState, ...]:
    """The nodes that a gathering replica starts with now; empty while it waits for others.

    It waits longest for a node that is on its way, and for confirmation that no rank of a lost node is left: its ranks
    and the new ones must not run concurrently.
    """
    ready = state.ready_nodes & replica.slots
    if ready == replica.slots:
        return state.nodes_of(replica.replica)
    if Timer.MIN_NODES.key(replica.replica) in state.timers or len(ready) < min_nodes(job, state):
        return ()
    nodes = state.nodes_of(replica.replica)
    undecided = any(node.is_expected or node.maybe_alive for node in nodes)
    return () if undecided else tuple(node for node in nodes if node.is_ready)


def too_few_nodes_finding(job: Job, state: State, index: int, at: float) -> Finding | None:
    """The finding for a replica that waited too long for nodes; None if enough are joined or disconnected."""
    nodes = state.nodes_of(index)
    there = sum(node.phase is NodePhase.JOINED for node in nodes)
    if sum(not node.is_missing for node in nodes) >= min_nodes(job, state):
        return None
    absent = [node for node in nodes if node.phase is not NodePhase.JOINED]
    return Finding(
        code="too-few-nodes",
        severity=Severity.WARNING,
        what=f"{there} of {len(nodes)} nodes are there, and the run waits until there are {min_nodes(job, state)}",
        where=", ".join(f"node{node.node}" for node in absent[:MAX_REASONS]),
        evidence=tuple(_absence_text(node, at) for node in absent[:MAX_REASONS]),
        remedy="Nothing, if a node will come back: the run resumes by itself. Otherwise ask for fewer, or a range.",
        owner=Owner.CLUSTER,
    )


def scale_up(ctx: Context, index: int) -> None:
    """Add nodes, now or when due, if it has spare nodes and no other is on its way."""
    replica = ctx.state.replicas[index]
    if ctx.state.ending or replica.exit_requested or not ctx.state.ready_nodes & replica.slots:
        return
    nodes = ctx.state.nodes_of(index)
    fresh = tuple(node for node in nodes if node.is_ready and node.node not in replica.members)
    if not fresh or any(node.is_expected for node in nodes):
        return
    due = scale_up_due(replica.scale_ups, ctx.at, ctx.job.recovery.restart_window_s)
    if ctx.at < due:
        ctx.set_timer(Timer.SCALE_UP, index, due)
        return
    ctx.change_replica(index, exit_requested=True)
    ctx.set_timer(Timer.EXIT, index, ctx.at + ctx.job.nodes.scale_up_timeout_s)
    ctx.report(_scale_up_finding(ctx.job, fresh, len(replica.members) + len(fresh), len(nodes)))
    request_exit(ctx, replica, replica.members)


def request_exit(ctx: Context, replica: ReplicaState, nodes: tuple[int, ...]) -> None:
    """Request that the ranks of these nodes exit, after a checkpoint or with their state kept in memory."""
    reason = "the run resumes with other code" if replica.transfers_state else "the run resumes with more nodes"
    ctx.send(CheckpointAndExit(reason=reason, transfer_state=replica.transfers_state), nodes)


def checkpoint_committed(ctx: Context, event: CheckpointCommitted) -> None:
    """Remember its step; ranks that were requested to exit have `EXIT_GRACE_S` to do so."""
    earlier = (step for step in ctx.state.replicas[event.replica].checkpoints if step < event.step)
    ctx.change_replica(event.replica, checkpoints=(*earlier, event.step)[-REMEMBERED:])
    if ctx.state.replicas[event.replica].exit_requested:
        shorten_exit_timeout(ctx, event.replica)


def shorten_exit_timeout(ctx: Context, index: int) -> None:
    """Limit the remaining wait for a replica that is exiting."""
    ctx.set_timer(Timer.EXIT, index, ctx.at + EXIT_GRACE_S, earliest=True)


def exit_timed_out(ctx: Context, index: int) -> None:
    """Its ranks have not exited on request: stop them."""
    if ctx.state.replicas[index].exit_requested:
        ctx.raise_(FollowUp.STOP, index=index)


def _scale_up_finding(job: Job, fresh: tuple[NodeState, ...], after: int, full: int) -> Finding:
    names = ", ".join(f"node{node.node}" for node in fresh)
    return Finding(
        code="scale-up-started",
        severity=Severity.INFO,
        what=f"{names} can take part: after a checkpoint the ranks start again on {after} of {full} nodes",
        where=names,
        remedy="Nothing: ranks without a holdfast.train Session are stopped "
        f"within {job.nodes.scale_up_timeout_s:g} s.",
    )


def world_size_change(
    job: Job, state: State, previous: ReplicaState, members: tuple[int, ...], at: float
) -> WorldSizeChanged | None:
    """What changes when a replica's next attempt has these members; None if their number stays the same."""
    slots = state.nodes_of(previous.replica)
    before, after = len(previous.members) or len(slots), len(members)
    if before == after:
        return None
    ranks = job.local_world_size
    factor = job.learning_rate_factor(after * ranks, len(slots) * ranks)
    honoured = _settings_confirmed(previous)
    keeps = job.recovery.global_batch is GlobalBatch.KEEP
    batch = ScalingEffect.AS_CONFIGURED if honoured is False else ScalingEffect.KEPT if keeps else ScalingEffect.SCALED
    rate_kept = keeps or job.recovery.learning_rate is LearningRate.KEEP
    rate = (
        ScalingEffect.AS_CONFIGURED if honoured is False else ScalingEffect.KEPT if rate_kept else ScalingEffect.SCALED
    )
    samples = previous.step_rate.global_batch
    taking_part = set(members)
    absent = [node for node in slots if node.node not in taking_part]
    return WorldSizeChanged(
        at=at,
        replica=previous.replica,
        attempt=previous.attempt + 1,
        nodes=members,
        missing_nodes=tuple(node.node for node in absent),
        world_size=after * ranks,
        previous_world_size=len(previous.members) * ranks,
        full_world_size=len(slots) * ranks,
        global_batch=batch,
        samples=samples if samples is None or keeps else samples * after // before,
        learning_rate=rate,
        learning_rate_factor=1.0 if honoured is False else factor,
        confirmed=honoured is not None,
        remaining_s=_remaining_s(previous, before / after if batch is ScalingEffect.KEPT else 1.0),
        reason="; ".join(_absence_text(node, at) for node in absent[:MAX_REASONS]),
    )


def _settings_confirmed(replica: ReplicaState) -> bool | None:
    """Whether the ranks honour the job's batch size and learning rate; None while that is unknown."""
    if replica.step_rate.global_batch is not None:
        return True
    return False if replica.highest_step > 0 else None


def _remaining_s(replica: ReplicaState, slower: float) -> float | None:
    step_rate = replica.step_rate
    if step_rate.step_s is None or step_rate.total_steps is None:
        return None
    return max(0, step_rate.total_steps - replica.highest_step) * step_rate.step_s * slower


def _absence_text(node: NodeState, at: float) -> str:
    phase_text = {
        NodePhase.REQUESTED: "is requested",
        NodePhase.UNAVAILABLE: "unavailable",
        NodePhase.CREATED: "was made and has not joined",
        NodePhase.DISCONNECTED: "is unreachable",
        NodePhase.JOINED: "has joined",
    }[node.phase]
    since = f" (asked for {at - node.since:.0f} s ago)" if node.is_missing else ""
    return f"node{node.node} {phase_text}{since}{f': {node.reason}' if node.reason else ''}"
