"""Handles events of nodes and their agents: they join, leave, are lost, and their slots are refilled.

A long file, because one loss may touch all of these.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast import events
from holdfast.control import elastic
from holdfast.control.commands import FinishRun, PrepareNode, ReplaceNode, SubmitNodes
from holdfast.control.context import Context, FollowUp
from holdfast.control.elastic import request_exit
from holdfast.control.hangs import await_reports, send_report_request
from holdfast.control.lifecycle import start_command
from holdfast.control.node_set import NodeSet
from holdfast.control.node_slots import (
    arm_join_timeout,
    avoid_again,
    empty_slot,
    leave_probe,
    nodes_changed,
    promote_standbys,
    record_requested,
    request_check,
    stop_probe_again,
)
from holdfast.control.notices import missed_announcements
from holdfast.control.policy import PROGRESS_STEPS, Failure, FailureKind, never_joined_finding
from holdfast.control.replays import leave_replay
from holdfast.control.requests import cordon_again, send_pending_faults
from holdfast.control.rollout import fetch_on_join
from holdfast.control.state import CheckPhase, NodePhase, NodeState, ReplicaPhase, ReplicaState, Timer
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.job.spec import Job
from holdfast.protocol.orders import Shutdown, StopRanks

# A new controller


def controller_started(ctx: Context, event: events.ControllerStarted) -> None:
    """Every agent counts as disconnected, with a new deadline to reconnect; missing nodes are requested again.

    `RESUME` then has each replica repeat its order to stop, or restart its wait for hang reports or nodes.
    """
    if ctx.state.shutting_down:
        ctx.emit(FinishRun())
        return
    missing = tuple(node for node in ctx.state.nodes if node.is_missing)
    for node in ctx.state.nodes:
        if not node.is_missing:
            _disconnect(ctx, node.node, ctx.at)
    _request_missing_again(ctx, missing)
    for replica in ctx.state.replicas:
        ctx.raise_(FollowUp.RESUME, index=replica.replica)


def _request_missing_again(ctx: Context, missing: tuple[NodeState, ...]) -> None:
    """Request the nodes that are needed and missing: earlier requests may have been lost."""
    if ctx.state.ending:
        return
    cordon_again(ctx)
    avoid_again(ctx)
    needed = [node.node for node in missing if not _is_unneeded(ctx, node.replica)]
    for index in needed:
        node = ctx.change_node(index, phase=NodePhase.REQUESTED, since=ctx.at)
        arm_join_timeout(ctx, node)
        record_requested(ctx, node)
    node_ids = tuple(ctx.state.nodes[index].node_id for index in needed)
    if fresh := tuple(node_id for node_id in node_ids if node_id.generation == 0):
        ctx.emit(SubmitNodes(node_ids=fresh))
    again = "the controller was replaced before this was known to be done"
    ctx.emit(*(ReplaceNode(node_id=node_id, reason=again) for node_id in node_ids if node_id.generation > 0))


def wait_again(ctx: Context, index: int) -> None:
    """The wait for missing nodes starts again."""
    if ctx.timer(Timer.MIN_NODES, index) is not None:
        ctx.set_timer(Timer.MIN_NODES, index, ctx.at + ctx.job.nodes.min_nodes_wait_s)


# Nodes that come


def node_created(ctx: Context, event: events.NodeCreated) -> None:
    """The node's predecessor is gone; its agent's time to join starts."""
    node = ctx.change_node(event.node, machine=event.machine)
    if not node.is_missing or _is_unneeded(ctx, node.replica):
        return
    _arm_min_nodes_timeout(ctx, node)
    arm_join_timeout(ctx, ctx.change_node(node.node, phase=NodePhase.CREATED, since=ctx.at, maybe_alive=False))
    nodes_changed(ctx, node.replica)


def _arm_min_nodes_timeout(ctx: Context, node: NodeState) -> None:
    """The first node to come while none is there starts the wait for the others, since a gang is scheduled together."""
    if not ctx.job.nodes.is_elastic or node.replica is None or ctx.timer(Timer.MIN_NODES, node.replica) is not None:
        return
    awaited = (NodePhase.REQUESTED, NodePhase.UNAVAILABLE)
    if all(other.phase in awaited for other in ctx.state.nodes_of(node.replica)):
        ctx.set_timer(Timer.MIN_NODES, node.replica, ctx.at + ctx.job.nodes.min_nodes_wait_s)


def node_unavailable(ctx: Context, event: events.NodeUnavailable) -> None:
    """The target cannot create the node yet, and does so later; its predecessor is gone."""
    if ctx.state.nodes[event.node].is_missing:
        node = ctx.change_node(event.node, phase=NodePhase.UNAVAILABLE, reason=event.reason, maybe_alive=False)
        nodes_changed(ctx, node.replica)


def agent_connected(ctx: Context, event: events.AgentConnected) -> None:
    """Register the agent; ranks on its node that should not run must stop."""
    if (node := _register(ctx, event)) is None:
        return
    send_pending_faults(ctx, node.node)
    if node.has_processes:
        replica, grace_s = _replica_of(ctx, node), ctx.state.ending.grace_s if ctx.state.ending else 0.0
        ctx.send(StopRanks(replica=replica.replica, attempt=replica.attempt, grace_s=grace_s), (node.node,))
    fetch_on_join(ctx, node.node)
    nodes_changed(ctx, node.replica)


def agent_connected_to_attempt(ctx: Context, event: events.AgentConnected) -> None:
    """Register the agent; one that was disconnected while its ranks ran gets what it missed."""
    if (node := _register(ctx, event)) is None:
        return
    replica = _replica_of(ctx, node)
    missed_start = node.has_processes and event.attempt < replica.attempt
    if missed_start:
        ctx.emit(start_command(replica, (node.node,)))
    send_pending_faults(ctx, node.node)  # after a start, at which an agent forgets its faults
    if node.has_processes and not missed_start:
        if replica.phase is ReplicaPhase.HANG_SUSPECTED:
            send_report_request(ctx, replica, (node.node,))
            await_reports(ctx, replica.replica)
        elif replica.exit_requested:
            request_exit(ctx, replica, (node.node,))
    missed_announcements(ctx, node.node)
    fetch_on_join(ctx, node.node)
    nodes_changed(ctx, node.replica)


def standby_connected(ctx: Context, event: events.AgentConnected) -> None:
    """Register the agent of a standby, which prepares unless it is ready."""
    known = ctx.state.nodes[event.node].incarnation
    if (node := _register(ctx, event)) is None:
        return
    send_pending_faults(ctx, node.node)
    fetch_on_join(ctx, node.node)
    if known != event.incarnation:
        _set_ready(ctx, node.node, False)
    if node.node not in ctx.state.ready_standbys:
        ctx.emit(PrepareNode(node=node.node))
    nodes_changed(ctx, None)


def _register(ctx: Context, event: events.AgentConnected) -> NodeState | None:
    """Mark a node as joined; None if its agent was restarted, and so its attempt has failed."""
    known = ctx.state.nodes[event.node]
    restarted = known.has_processes and bool(known.incarnation) and known.incarnation != event.incarnation
    node = ctx.change_node(
        event.node,
        phase=NodePhase.JOINED,
        reason="",
        join_timed_out=False,
        maybe_alive=False,
        incarnation=event.incarnation,
        connected_at=event.at,
        address=event.address,
        port=event.port,
        check=known.check if known.incarnation == event.incarnation else CheckPhase.NONE,
        has_processes=known.has_processes and not restarted,
    )
    ctx.set_timer(Timer.RECONNECT, event.node, None)
    if known.incarnation != event.incarnation:
        leave_probe(ctx, event.node, gone=True)
    leave_replay(ctx, event.node, gone=known.incarnation != event.incarnation)
    stop_probe_again(ctx, event.node)
    request_check(ctx, event.node)
    if not restarted:
        return node
    send_pending_faults(ctx, event.node)
    fail_replica(ctx, (node,), "its agent was restarted, and ranks die with their agent")
    return None


def standby_ready(ctx: Context, event: events.StandbyReady) -> None:
    """The standby may take the place of a missing node; one that never reports this never does."""
    _set_ready(ctx, event.node, True)
    nodes_changed(ctx, None)


def _set_ready(ctx: Context, standby: int, ready: bool) -> None:
    ctx.change(ready_standbys=ctx.state.ready_standbys.with_member(standby, ready))


# Nodes that go


def agent_disconnected(ctx: Context, event: events.AgentDisconnected) -> None:
    """Its node has until a deadline to reconnect."""
    if event.incarnation == ctx.state.nodes[event.node].incarnation:
        _disconnect(ctx, event.node, ctx.at)


def _disconnect(ctx: Context, node: int, at: float) -> None:
    ctx.change_node(node, phase=NodePhase.DISCONNECTED)
    ctx.set_timer(Timer.CHECK, node, None)  # the order is sent again when it is back
    leave_probe(ctx, node, gone=False)
    ctx.set_timer(Timer.RECONNECT, node, at + _reconnect_timeout_s(ctx.job))


def _reconnect_timeout_s(job: Job) -> float:
    return HeartbeatTimeouts(node_grace_s=job.recovery.node_grace_s).reconnect_s


def node_terminated(ctx: Context, event: events.NodeTerminated) -> None:
    """The target reports the node as gone; an agent that runs nevertheless must not outlive its successor's start.

    Kubernetes may delete the pod of a machine whose kubelet is silent, and which ends nothing. One that leaves by
    itself may save first.
    """
    node = ctx.state.nodes[event.node]
    if node.phase is NodePhase.JOINED:
        ctx.send(Shutdown(), (node.node,))
    lose_nodes(ctx, (node,), event.reason, confirmed_gone=True)


def node_evicted(ctx: Context, event: events.NodeEvicted) -> None:
    """A failure that the eviction causes, or has just caused, costs no restart."""
    node = ctx.change_node(event.node, evicted=True)
    if node.replica is None or node.is_missing:  # a node that never joined has no part in earlier failures
        return
    replica = ctx.state.replicas[node.replica]
    losses = tuple(replace(loss, evicted=loss.evicted or loss.node == node.node) for loss in replica.node_failures)
    known = replica.failures
    if known and known[-1].attempt == replica.attempt and _is_loss_of(known[-1], node):
        known = (*known[:-1], replace(known[-1], evicted=True))
    ctx.change_replica(node.replica, node_failures=losses, failures=known)


def _is_loss_of(failure: Failure, node: NodeState) -> bool:
    return failure.kind in (FailureKind.NODE_LOST, FailureKind.NODE_PREEMPTED) and failure.node == node.node


def node_leaving(ctx: Context, event: events.NodePreemptionNotice) -> None:
    """The node has the grace period to go, and the time to reconnect."""
    if ctx.state.nodes[event.node].phase is NodePhase.JOINED:
        _disconnect(ctx, event.node, ctx.at + event.grace_s)


def node_preempted(ctx: Context, event: events.NodePreemptionNotice) -> None:
    """The replica's ranks, all healthy, have the grace period to save and exit."""
    known = ctx.state.nodes[event.node]
    node_leaving(ctx, event)
    if known.phase is NodePhase.JOINED and known.has_processes and not ctx.state.ending:
        reason = f"its agent got SIGTERM; ranks had {event.grace_s:g} s to save and end (recovery.stop_grace_s)"
        fail_replica(ctx, (ctx.state.nodes[event.node],), reason, kind=FailureKind.NODE_PREEMPTED)


def lose_nodes(
    ctx: Context,
    nodes: tuple[NodeState, ...],
    reason: str,
    *,
    kind: FailureKind = FailureKind.NODE_LOST,
    failed_at: float | None = None,
    confirmed_gone: bool = False,
) -> None:
    """Refill the slots of lost nodes of a replica; what ran on them, or was about to, has failed.

    `confirmed_gone` means that nothing of them is left.
    """
    for node in nodes:
        empty_slot(ctx, node.node, reason, maybe_alive=node.has_processes and not confirmed_gone)
        _set_ready(ctx, node.node, False)
    index = nodes[0].replica
    if index is not None:
        promote_standbys(ctx)
        if not all(node.is_missing for node in nodes):
            ctx.set_timer(Timer.MIN_NODES, index, ctx.at + ctx.job.nodes.min_nodes_wait_s)
        if _is_unneeded(ctx, index):
            ctx.raise_(FollowUp.ADVANCE, index=index)
            return
        fails = _is_failure(ctx, nodes)
        _mark_slots_lost(ctx, index, nodes, failure=fails)
        if fails:
            fail_replica(ctx, nodes, reason, kind=kind, failed_at=failed_at)
        else:
            ctx.raise_(FollowUp.ADVANCE, index=index)
    for node in nodes:
        ctx.raise_(FollowUp.REFILL, index=node.node)
    if index is not None:
        ctx.raise_(FollowUp.SCALE_UP, index=index)


def _is_failure(ctx: Context, nodes: tuple[NodeState, ...]) -> bool:
    """Whether the loss of these nodes, in their former state, is also a failure of their replica.

    Nodes lost while their replica is down for a failure count to that failure, unless a slot is lost again.
    """
    replica = _replica_of(ctx, nodes[0])
    match replica.phase:
        case ReplicaPhase.RUNNING | ReplicaPhase.HANG_SUSPECTED:
            return any(node.has_processes for node in nodes)
        case ReplicaPhase.STOPPING:
            return any(node.node in replica.members for node in nodes)
        case _:
            there = sum(not node.is_missing for node in ctx.state.nodes_of(replica.replica))
            if ctx.job.nodes.is_elastic and there >= elastic.min_nodes(ctx.job, ctx.state):
                return False
            known = replica.failures
            down = bool(known) and known[-1].attempt == replica.attempt
            return not down or any(node.node in replica.lost_slots for node in nodes)


def _mark_slots_lost(ctx: Context, index: int, nodes: tuple[NodeState, ...], *, failure: bool) -> None:
    """Record which slots were lost while no attempt could run; a failure meanwhile starts another disruption."""
    replica = ctx.state.replicas[index]
    if replica.is_running and not any(node.has_processes for node in nodes):
        return  # its attempt continues without them
    lost = NodeSet.of(node.node for node in nodes)
    again = failure and replica.phase is ReplicaPhase.GATHERING
    ctx.change_replica(index, lost_slots=lost if again else replica.lost_slots | lost)


def fail_replica(
    ctx: Context,
    nodes: tuple[NodeState, ...],
    reason: str,
    *,
    kind: FailureKind = FailureKind.NODE_LOST,
    failed_at: float | None = None,
) -> None:
    """Fail the replica of these nodes, since what ran on them is gone."""
    replica = _replica_of(ctx, nodes[0])
    in_time = kind is FailureKind.NODE_PREEMPTED and ctx.job.recovery.stop_grace_s > 0
    losses = tuple(
        Failure(
            kind=kind,
            at=ctx.at if failed_at is None else failed_at,
            node=node.node,
            machine=node.machine_id,
            attempt=replica.attempt,
            replica=replica.replica,
            error=reason,
            step=replica.highest_step,
            made_progress=replica.attempt_steps >= PROGRESS_STEPS,
            uptime_s=ctx.at - replica.started_at,
            evicted=node.evicted,
        )
        for node in nodes
    )
    ctx.change_replica(
        replica.replica,
        node_failures=(*replica.node_failures, *losses),
        # a hung replica is not waited for
        draining=ctx.state.has_replicas and in_time and replica.phase is ReplicaPhase.RUNNING,
    )
    ctx.raise_(FollowUp.STOP, index=replica.replica)


def _replica_of(ctx: Context, node: NodeState) -> ReplicaState:
    assert node.replica is not None, f"node{node.node} is a standby, on which nothing runs"
    return ctx.state.replicas[node.replica]


# Deadlines


def reconnect_timed_out(ctx: Context, index: int) -> None:
    """The node's time to reconnect is up: it is lost."""
    node, grace_s = ctx.state.nodes[index], ctx.job.recovery.node_grace_s
    where = f" on {node.machine}" if node.machine else ""
    reason = f"its agent{where} has been out of reach for recovery.node_grace_s, {grace_s:g} s"
    lose_nodes(ctx, (node,), reason, failed_at=ctx.at - _reconnect_timeout_s(ctx.job))


def join_timed_out(ctx: Context, index: int) -> None:
    """Replace nodes that have not joined in time; if too few are there without them, the replica fails."""
    if ctx.state.ending:
        return
    patience_s = ctx.job.recovery.join_timeout_s
    expected = [node for node in ctx.state.nodes_of(index) if _is_joining(node)]
    late = tuple(node for node in expected if ctx.at >= node.since + patience_s)
    if late:
        _lose_late_nodes(ctx, tuple(ctx.change_node(node.node, join_timed_out=True) for node in late))
    elif expected:
        ctx.set_timer(Timer.JOIN, index, min(node.since for node in expected) + patience_s)


def standby_join_timed_out(ctx: Context, index: int) -> None:
    """Replace a standby that has not joined in time; nothing has waited for it."""
    node = ctx.state.nodes[index]
    if not _is_joining(node) or ctx.state.ending:
        return
    if ctx.at < node.since + ctx.job.recovery.join_timeout_s:
        arm_join_timeout(ctx, node)
    else:
        _lose_late_nodes(ctx, (node,))


def _lose_late_nodes(ctx: Context, nodes: tuple[NodeState, ...]) -> None:
    reason = f"no message from its agent for {ctx.job.recovery.join_timeout_s:g} s"
    for node in nodes:
        ctx.report(never_joined_finding(node.node, reason))
    lose_nodes(ctx, nodes, reason, kind=FailureKind.NEVER_JOINED)


def stop_timed_out(ctx: Context, index: int) -> None:
    """Nodes that could not stop their ranks in time are lost."""
    busy = tuple(ctx.state.nodes[node] for node in ctx.state.busy_nodes_of(index))
    lose_nodes(ctx, busy, "it could not end its ranks in time")


def _is_joining(node: NodeState) -> bool:
    return node.phase in (NodePhase.REQUESTED, NodePhase.CREATED)


def _is_unneeded(ctx: Context, replica: int | None) -> bool:
    done = replica is not None and ctx.state.replicas[replica].phase is ReplicaPhase.DONE
    return ctx.state.ending is not None or done
