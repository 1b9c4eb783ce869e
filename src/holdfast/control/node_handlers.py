"""Handles events of nodes and their agents: they join, leave, are lost, and their slots are refilled.

The file is long because it handles every event of a node, from its request to its removal.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control import elastic, fault_requests, rollout, scale_up, standby_promotion
from holdfast.control.commands import AnnounceReplicaDown, Commands, FinishRun, RecordEvent, ReplaceNode, SubmitNodes
from holdfast.control.lifecycle import (
    advance,
    mark_departed,
    report_silent_command,
    start_command,
    stop_command,
    stop_replica,
    stop_running_nodes,
)
from holdfast.control.node_slots import arm_join_timeout, next_generation, node_requested, request_again
from holdfast.control.policy import HANG_VERDICT_S, PROGRESS_STEPS, Failure, FailureKind, never_joined_finding
from holdfast.control.state import NodePhase, NodeState, ReplicaPhase, ReplicaState, State, Timer, Transition
from holdfast.events import (
    AgentConnected,
    AgentDisconnected,
    ControllerStarted,
    FindingRaised,
    NodeCreated,
    NodeEvicted,
    NodePreemptionNotice,
    NodeTerminated,
    NodeUnavailable,
    StandbyReady,
)
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.job.spec import Job


def controller_started(job: Job, state: State, event: ControllerStarted) -> Transition:
    """Handle a new controller: every agent counts as disconnected until it reconnects, with a new deadline."""
    if state.shutting_down:
        return state, (FinishRun(),)
    missing = tuple(node for node in state.nodes if node.is_missing)
    for node in state.nodes:
        if not node.is_missing:
            state = _mark_disconnected(job, state, node, event.at)
    state, commands = _request_missing_again(job, state, missing, event.at)
    for replica in state.replicas:
        if replica.phase is ReplicaPhase.HANG_SUSPECTED:
            state = state.with_timer(Timer.HANG_VERDICT.key(replica.replica), event.at + HANG_VERDICT_S)
        elif replica.phase is ReplicaPhase.STOPPING:
            state = state.with_timer(Timer.STOP.key(replica.replica), None)
            state, more = stop_running_nodes(job, state, replica.replica, event.at)
            commands = (*commands, *more)
        elif Timer.MIN_NODES.key(replica.replica) in state.timers:
            state = state.with_timer(Timer.MIN_NODES.key(replica.replica), event.at + job.nodes.min_nodes_wait_s)
    return state, commands


def _request_missing_again(job: Job, state: State, missing: tuple[NodeState, ...], at: float) -> Transition:
    """Request the nodes that are needed and missing: earlier requests may have been lost."""
    if state.ending:
        return state, ()
    done = {replica.replica for replica in state.replicas if replica.phase is ReplicaPhase.DONE}
    waiting = tuple(node.node_id for node in missing if node.replica not in done)
    for place in waiting:
        state = arm_join_timeout(job, state, replace(state.nodes[place.node], phase=NodePhase.REQUESTED, since=at))
    fresh = tuple(place for place in waiting if place.generation == 0)
    again = "the controller was replaced before this was known to be done"
    return state, (
        *fault_requests.cordon_commands(state),
        *(node_requested(state.nodes[place.node], at) for place in waiting),
        *((SubmitNodes(node_ids=fresh),) if fresh else ()),
        *(ReplaceNode(node_id=place, reason=again) for place in waiting if place.generation > 0),
    )


def node_created(job: Job, state: State, event: NodeCreated) -> Transition:
    """Handle a node's creation, which confirms that its predecessor is gone; its agent's time to join starts."""
    node = state.nodes[event.node]
    if event.generation != node.generation or not node.is_missing or _is_unneeded(state, node.replica):
        return state, ()
    state = _arm_min_nodes_timeout(job, state, node, event.at)
    state = arm_join_timeout(job, state, replace(node, phase=NodePhase.CREATED, since=event.at, maybe_alive=False))
    return _advance(job, state, node.replica, event.at)


def _arm_min_nodes_timeout(job: Job, state: State, node: NodeState, at: float) -> State:
    """The first node to come while none is there starts the wait for the others, since a gang is scheduled together."""
    if not job.nodes.is_elastic or node.replica is None or Timer.MIN_NODES.key(node.replica) in state.timers:
        return state
    awaited = (NodePhase.REQUESTED, NodePhase.UNAVAILABLE)
    if any(other.phase not in awaited for other in state.nodes_of(node.replica)):
        return state
    return state.with_timer(Timer.MIN_NODES.key(node.replica), at + job.nodes.min_nodes_wait_s)


def node_unavailable(job: Job, state: State, event: NodeUnavailable) -> Transition:
    """Handle a node that the back end cannot create yet; its predecessor is gone, and the back end creates it later."""
    node = state.nodes[event.node]
    if event.generation != node.generation or not node.is_missing:
        return state, ()
    state = state.with_node(replace(node, phase=NodePhase.UNAVAILABLE, reason=event.reason, maybe_alive=False))
    return _advance(job, state, node.replica, event.at)


def _advance(job: Job, state: State, replica: int | None, at: float) -> Transition:
    """Promote ready standbys, and advance replicas that may have waited for this."""
    state, commands, gained = standby_promotion.promote_standbys(job, state, at)
    for index in dict.fromkeys((*gained, *(() if replica is None else (replica,)))):
        state, more = advance(job, state, index, at)
        state, grown = scale_up.maybe_scale_up(job, state, index, at)
        commands = (*commands, *more, *grown)
    return state, commands


def agent_connected(job: Job, state: State, event: AgentConnected) -> Transition:
    """Handle a connected or reconnected agent: send it what it has missed."""
    node = state.nodes[event.node]
    if event.generation != node.generation:
        return state, ()
    another = node.incarnation != event.incarnation
    reborn = node.has_processes and bool(node.incarnation) and another
    node = replace(
        node,
        phase=NodePhase.JOINED,
        reason="",
        join_timed_out=False,
        maybe_alive=False,
        incarnation=event.incarnation,
        address=event.address,
        port=event.port,
        has_processes=node.has_processes and not reborn,
    )
    state = state.with_node(node).with_timer(Timer.RECONNECT.key(node.node), None)
    commands: Commands = fault_requests.pending_for_node(job, state, node.node)
    if reborn:
        reason = "its agent was restarted, and ranks die with their agent"
        state, more = fail_replica(job, state, (node,), event.at, reason)
        return state, (*commands, *more)
    state, fetching = rollout.on_node_joined(state, node)
    if node.replica is None:
        state = state.with_ready_standby(node.node, False) if another else state
        prepare = standby_promotion.prepare_standby(state, node.node)
        state, more = _advance(job, state, None, event.at)
        return state, (*commands, *fetching, *prepare, *more)
    replica = state.replicas[node.replica]
    match replica.phase:
        case ReplicaPhase.RUNNING | ReplicaPhase.HANG_SUSPECTED if (
            event.attempt < replica.attempt and node.has_processes
        ):
            commands = (start_command(replica, (node,)), *commands)
        case ReplicaPhase.HANG_SUSPECTED if node.has_processes:
            commands = (*commands, report_silent_command(replica, (node,)))
        case ReplicaPhase.STOPPING | ReplicaPhase.GATHERING | ReplicaPhase.DONE if node.has_processes:
            commands = (*commands, stop_command(replica, (node,), state.ending.grace_s if state.ending else 0.0))
        case ReplicaPhase.RUNNING if replica.exit_requested and node.has_processes:
            asked = rollout.transfer_and_exit if replica.transfers_state else scale_up.checkpoint_and_exit
            commands = (*commands, asked((node.node,)))
        case _:
            pass
    if replica.is_running:
        commands = (*commands, *_missed_announcements(state, node))
    state, more = _advance(job, state, node.replica, event.at)
    return state, (*commands, *fetching, *more)


def standby_ready(job: Job, state: State, event: StandbyReady) -> Transition:
    """Handle a standby that is ready; one that never reports this is never promoted."""
    node = state.nodes[event.node]
    if event.generation != node.generation or node.replica is not None:
        return state, ()
    return _advance(job, state.with_ready_standby(node.node, True), None, event.at)


def _missed_announcements(state: State, node: NodeState) -> Commands:
    """What happened to other replicas while this node was disconnected; its ranks may receive it twice."""
    return tuple(
        AnnounceReplicaDown(replica=other.replica, attempt=other.attempt, nodes=(node.node,))
        for other in state.replicas
        if other.attempt >= 0
        and other.phase in (ReplicaPhase.STOPPING, ReplicaPhase.GATHERING)
        and not state.may_step(other)
    )


def agent_disconnected(job: Job, state: State, event: AgentDisconnected) -> Transition:
    """Handle a closed connection: its node has until a deadline to reconnect."""
    node = state.nodes[event.node]
    if event.generation != node.generation or event.incarnation != node.incarnation:
        return state, ()
    return _mark_disconnected(job, state, node, event.at), ()


def node_terminated(job: Job, state: State, event: NodeTerminated) -> Transition:
    """Handle a node that the back end reports as gone."""
    node = state.nodes[event.node]
    if event.generation != node.generation:
        return state, ()
    return nodes_lost(job, state, (node,), event.at, event.reason, confirmed_gone=True)


def node_evicted(job: Job, state: State, event: NodeEvicted) -> Transition:
    """Handle an eviction: a failure that it causes, or has just caused, costs no restart."""
    node = state.nodes[event.node]
    if event.generation != node.generation:
        return state, ()
    state = state.with_node(node.with_changes(evicted=True))
    if node.replica is None or node.is_missing:  # a node that never joined has no part in earlier failures
        return state, ()
    replica = state.replicas[node.replica]
    losses = tuple(replace(loss, evicted=loss.evicted or loss.node == node.node) for loss in replica.node_failures)
    known = replica.failures
    if known and known[-1].attempt == replica.attempt and _is_loss_of(known[-1], node):
        known = (*known[:-1], replace(known[-1], evicted=True))
    return state.with_replica(replace(replica, node_failures=losses, failures=known)), ()


def _is_loss_of(failure: Failure, node: NodeState) -> bool:
    return failure.kind in (FailureKind.NODE_LOST, FailureKind.NODE_PREEMPTED) and failure.node == node.node


def node_preemption_notice(job: Job, state: State, event: NodePreemptionNotice) -> Transition:
    """Handle a preemption notice: the replica's ranks, all healthy, have the grace period to save and exit."""
    node = state.nodes[event.node]
    if node.phase is not NodePhase.JOINED:
        return state, ()
    state = _mark_disconnected(job, state, node, event.at + event.grace_s)
    if state.ending or node.replica is None or not node.has_processes or not state.replicas[node.replica].is_running:
        return state, ()
    reason = f"its agent got SIGTERM; ranks had {event.grace_s:g} s to save and end (recovery.stop_grace_s)"
    return fail_replica(job, state, (state.nodes[node.node],), event.at, reason, kind=FailureKind.NODE_PREEMPTED)


def nodes_lost(
    job: Job,
    state: State,
    nodes: tuple[NodeState, ...],
    at: float,
    reason: str,
    *,
    kind: FailureKind = FailureKind.NODE_LOST,
    failed_at: float | None = None,
    confirmed_gone: bool = False,
) -> Transition:
    """Handle lost nodes of a replica: what ran on them, or was about to, has failed; their slots are refilled.

    `confirmed_gone` means that nothing of them is left.
    """
    gone = tuple(
        next_generation(node, at, reason, maybe_alive=node.has_processes and not confirmed_gone) for node in nodes
    )
    for node in gone:
        state = arm_join_timeout(job, state, node).with_timer(Timer.RECONNECT.key(node.node), None)
        state = state.with_ready_standby(node.node, False)
    if nodes[0].replica is None:
        return state, () if state.ending else request_again(gone, at, reason)
    state, promoted, _ = standby_promotion.promote_standbys(job, state, at)
    replica = state.replicas[nodes[0].replica]
    if not all(node.is_missing for node in nodes):
        state = state.with_timer(Timer.MIN_NODES.key(replica.replica), at + job.nodes.min_nodes_wait_s)
    gone = tuple(state.nodes[node.node] for node in gone)
    if state.ending or replica.phase is ReplicaPhase.DONE:
        return advance(job, state, replica.replica, at)
    needed = _is_failure(job, state, nodes)
    state = _mark_slots_lost(
        state, replica.replica, nodes, new_disruption=needed and replica.phase is ReplicaPhase.GATHERING
    )
    if needed:
        state, commands = fail_replica(job, state, nodes, at, reason, kind=kind, failed_at=failed_at)
    else:
        state, commands = advance(job, state, replica.replica, at)
    if state.ending:
        return state, commands
    state, more = scale_up.maybe_scale_up(job, state, replica.replica, at)
    return state, (*promoted, *commands, *request_again(gone, at, reason), *more)


def _is_failure(job: Job, state: State, nodes: tuple[NodeState, ...]) -> bool:
    """Whether the loss of these nodes, in their former state, is also a failure of their replica.

    Nodes lost while their replica is down for a failure count to that failure, unless a slot is lost again.
    """
    replica = _replica_of(state, nodes)
    match replica.phase:
        case ReplicaPhase.RUNNING | ReplicaPhase.HANG_SUSPECTED:
            return any(node.has_processes for node in nodes)
        case ReplicaPhase.STOPPING:
            return any(node.node in replica.members for node in nodes)
        case _:
            there = [node for node in state.nodes_of(replica.replica) if not node.is_missing]
            if job.nodes.is_elastic and len(there) >= elastic.min_nodes(job, state):
                return False
            known = replica.failures
            down = bool(known) and known[-1].attempt == replica.attempt
            return not down or any(replica.lost_slots >> node.node & 1 for node in nodes)


def _mark_slots_lost(state: State, index: int, nodes: tuple[NodeState, ...], *, new_disruption: bool) -> State:
    """Record which slots were lost while no attempt could run; `new_disruption` starts another disruption."""
    replica = state.replicas[index]
    if replica.is_running and not any(node.has_processes for node in nodes):
        return state  # its attempt continues without them
    lost = sum(1 << node.node for node in nodes)
    return state.with_replica(replace(replica, lost_slots=lost if new_disruption else replica.lost_slots | lost))


def fail_replica(
    job: Job,
    state: State,
    nodes: tuple[NodeState, ...],
    at: float,
    reason: str,
    *,
    kind: FailureKind = FailureKind.NODE_LOST,
    failed_at: float | None = None,
) -> Transition:
    """Fail the replica of these nodes, since what ran on them is gone."""
    replica = _replica_of(state, nodes)
    state, departed = mark_departed(state, replica.replica)
    in_time = kind is FailureKind.NODE_PREEMPTED and job.recovery.stop_grace_s > 0
    leaves = (
        state.has_replicas and in_time and replica.phase is ReplicaPhase.RUNNING
    )  # a hung replica is not waited for
    losses = tuple(
        Failure(
            kind=kind,
            at=at if failed_at is None else failed_at,
            node=node.node,
            attempt=replica.attempt,
            error=reason,
            step=replica.highest_step,
            made_progress=replica.attempt_steps >= PROGRESS_STEPS,
            uptime_s=at - replica.started_at,
            evicted=node.evicted,
        )
        for node in nodes
    )
    state = state.with_replica(replace(replica, node_failures=(*replica.node_failures, *losses), draining=leaves))
    state, commands = stop_replica(job, state, replica.replica, at)
    return state, (*departed, *commands)


def _replica_of(state: State, nodes: tuple[NodeState, ...]) -> ReplicaState:
    """The replica of these nodes, now or before."""
    index = nodes[0].replica
    assert index is not None, f"node{nodes[0].node} is a standby, on which nothing runs"
    return state.replicas[index]


def on_reconnect_timeout(job: Job, state: State, index: int, at: float) -> Transition:
    """A node's time to reconnect is up."""
    reason = f"its agent has been out of reach for recovery.node_grace_s, {job.recovery.node_grace_s:g} s"
    return nodes_lost(job, state, (state.nodes[index],), at, reason, failed_at=at - _reconnect_timeout_s(job))


def on_join_timeout(job: Job, state: State, index: int, at: float) -> Transition:
    """Replace nodes that have not joined in time; if too few are there without them, the replica fails."""
    patience_s = job.recovery.join_timeout_s
    expected = [node for node in state.nodes_of(index) if node.phase in (NodePhase.REQUESTED, NodePhase.CREATED)]
    if not expected or _is_unneeded(state, index):
        return state, ()
    late = tuple(replace(node, join_timed_out=True) for node in expected if at >= node.since + patience_s)
    if not late:
        until = min(node.since for node in expected) + patience_s
        return state.with_timer(Timer.JOIN.key(index), until), ()
    reason = f"no word from its agent for {patience_s:g} s"
    found = tuple(
        RecordEvent(event=FindingRaised(at=at, finding=never_joined_finding(node.node, reason))) for node in late
    )
    state, commands = nodes_lost(job, state, late, at, reason, kind=FailureKind.NEVER_JOINED)
    return state, (*found, *commands)


def on_standby_join_timeout(job: Job, state: State, index: int, at: float) -> Transition:
    """Replace a standby that has not joined in time; nothing has waited for it."""
    node, patience_s = state.nodes[index], job.recovery.join_timeout_s
    if node.replica is not None or node.phase not in (NodePhase.REQUESTED, NodePhase.CREATED) or state.ending:
        return state, ()
    if at < node.since + patience_s:
        return arm_join_timeout(job, state, node), ()
    reason = f"no word from its agent for {patience_s:g} s"
    state, commands = nodes_lost(job, state, (node,), at, reason, kind=FailureKind.NEVER_JOINED)
    return state, (RecordEvent(event=FindingRaised(at=at, finding=never_joined_finding(node.node, reason))), *commands)


def _is_unneeded(state: State, replica: int | None) -> bool:
    done = replica is not None and state.replicas[replica].phase is ReplicaPhase.DONE
    return state.ending is not None or done


def on_stop_timeout(job: Job, state: State, index: int, at: float) -> Transition:
    """A replica's time to stop its ranks is up."""
    busy = tuple(node for node in state.nodes_of(index) if node.has_processes)
    return nodes_lost(job, state, busy, at, "it could not end its ranks in time")


def _mark_disconnected(job: Job, state: State, node: NodeState, at: float) -> State:
    away = node.with_changes(phase=NodePhase.DISCONNECTED)
    return state.with_node(away).with_timer(Timer.RECONNECT.key(node.node), at + _reconnect_timeout_s(job))


def _reconnect_timeout_s(job: Job) -> float:
    return HeartbeatTimeouts(node_grace_s=job.recovery.node_grace_s).reconnect_s
