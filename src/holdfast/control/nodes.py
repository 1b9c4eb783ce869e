"""Owns what follows from nodes and their agents: they join, leave, are lost, and their slots are filled again."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.commands import Commands, Finish, Record, ReplaceNode, SubmitNodes
from holdfast.control.course import halt, proceed, start, stop, stop_busy
from holdfast.control.policy import AWAY_GRACE_S, JUDGE_S, Failure, FailureKind
from holdfast.control.requests import pending_drills
from holdfast.control.state import Deadline, NodePhase, NodeState, ReplicaPhase, State, Transition
from holdfast.events import AgentJoined, AgentLeft, ControllerStarted, NodeGone, NodeRequested
from holdfast.job.spec import Job


def controller_started(job: Job, state: State, event: ControllerStarted) -> Transition:
    """No connection survives a controller: every agent is away until it has joined this one, with its time anew."""
    if state.ending and state.done:
        return state, (Finish(),)
    commands = _ask_again(state, event.at)
    for node in state.nodes:
        if node.phase is not NodePhase.REQUESTED:
            state = _away(state, node, event.at)
    for replica in state.replicas:
        if replica.phase is ReplicaPhase.JUDGING:
            state = state.with_deadline(Deadline.JUDGE.of(replica.replica), event.at + JUDGE_S)
        elif replica.phase is ReplicaPhase.STOPPING:
            state = state.with_deadline(Deadline.STOP.of(replica.replica), None)
            state, more = stop_busy(job, state, replica.replica, event.at)
            commands = (*commands, *more)
    return state, commands


def _ask_again(state: State, at: float) -> Commands:
    """Ask for the nodes that are needed and not there: whether they were asked for before is not known."""
    if state.ending:
        return ()
    done = {replica.replica for replica in state.replicas if replica.phase is ReplicaPhase.DONE}
    waiting = tuple(
        node.place for node in state.nodes if node.phase is NodePhase.REQUESTED and node.replica not in done
    )
    requests = (NodeRequested(at=at, node=place.node, generation=place.generation) for place in waiting)
    fresh = tuple(place for place in waiting if place.generation == 0)
    again = "the controller was replaced before this was known to be done"
    return (
        *(Record(event=request) for request in requests),
        *((SubmitNodes(places=fresh),) if fresh else ()),
        *(ReplaceNode(place=place, reason=again) for place in waiting if place.generation > 0),
    )


def agent_joined(job: Job, state: State, event: AgentJoined) -> Transition:
    """A node is there (again): give it whatever it has missed."""
    node = state.nodes[event.node]
    if event.generation != node.generation:
        return state, ()
    reborn = node.busy and bool(node.incarnation) and node.incarnation != event.incarnation
    node = replace(
        node,
        phase=NodePhase.JOINED,
        incarnation=event.incarnation,
        address=event.address,
        port=event.port,
        busy=node.busy and not reborn,
    )
    state = state.with_node(node).with_deadline(Deadline.AWAY.of(node.node), None)
    commands: Commands = pending_drills(job, state, node.node)
    if reborn:
        reason = "its agent was restarted, and ranks die with their agent"
        state, more = fail(job, state, (node,), event.at, reason)
        return state, (*commands, *more)
    replica = state.replicas[node.replica]
    match replica.phase:
        case ReplicaPhase.RUNNING | ReplicaPhase.JUDGING if event.attempt < replica.attempt and node.busy:
            commands = (*commands, start(replica, (node,)))
        case ReplicaPhase.STOPPING | ReplicaPhase.GATHERING | ReplicaPhase.DONE if node.busy:
            commands = (*commands, stop(replica, (node,), state.ending.grace_s if state.ending else 0.0))
        case _:
            pass
    state, more = proceed(job, state, node.replica, event.at)
    return state, (*commands, *more)


def agent_left(job: Job, state: State, event: AgentLeft) -> Transition:
    """A connection closed: its node has a while to come back."""
    node = state.nodes[event.node]
    if event.generation != node.generation or event.incarnation != node.incarnation:
        return state, ()
    return _away(state, node, event.at), ()


def node_gone(job: Job, state: State, event: NodeGone) -> Transition:
    """The back end says that a node is no more."""
    node = state.nodes[event.node]
    if event.generation != node.generation:
        return state, ()
    return lose(job, state, (node,), event.at, event.reason)


def lose(
    job: Job, state: State, nodes: tuple[NodeState, ...], at: float, reason: str, *, failed_at: float | None = None
) -> Transition:
    """Nodes of a replica are lost: what ran on them, or was about to, has failed; their slots are filled again."""
    gone = tuple(
        replace(node, phase=NodePhase.REQUESTED, busy=False, incarnation="", generation=node.generation + 1)
        for node in nodes
    )
    for node in gone:
        state = state.with_node(node).with_deadline(Deadline.AWAY.of(node.node), None)
    index = nodes[0].replica
    phase = state.replicas[index].phase
    if state.ending or phase is ReplicaPhase.DONE:
        return proceed(job, state, index, at)
    commands: Commands = ()
    if any(node.busy for node in nodes) or phase not in (ReplicaPhase.RUNNING, ReplicaPhase.JUDGING):
        state, commands = fail(job, state, gone, at, reason, failed_at=failed_at)
    if state.ending:
        return state, commands
    requests = (NodeRequested(at=at, node=node.node, generation=node.generation, reason=reason) for node in gone)
    records = (Record(event=request) for request in requests)
    return state, (*commands, *records, *(ReplaceNode(place=node.place, reason=reason) for node in gone))


def fail(
    job: Job, state: State, nodes: tuple[NodeState, ...], at: float, reason: str, *, failed_at: float | None = None
) -> Transition:
    """What ran on these nodes is gone, so their replica fails."""
    replica = state.replicas[nodes[0].replica]
    losses = tuple(
        Failure(
            kind=FailureKind.NODE_LOST,
            at=at if failed_at is None else failed_at,
            node=node.node,
            attempt=replica.attempt,
            error=reason,
            step=replica.step,
            lived_s=at - replica.started_at,
        )
        for node in nodes
    )
    state = state.with_replica(replace(replica, losses=(*replica.losses, *losses)))
    return halt(job, state, replica.replica, at)


def out_of_reach(job: Job, state: State, index: int, at: float) -> Transition:
    """A node's time to come back is up."""
    reason = f"its agent has been out of reach for {AWAY_GRACE_S:g} s"
    return lose(job, state, (state.nodes[index],), at, reason, failed_at=at - AWAY_GRACE_S)


def stubborn(job: Job, state: State, index: int, at: float) -> Transition:
    """A replica's time to end its ranks is up."""
    busy = tuple(node for node in state.nodes_of(index) if node.busy)
    return lose(job, state, busy, at, "it could not end its ranks in time")


def _away(state: State, node: NodeState, at: float) -> State:
    away = replace(node, phase=NodePhase.AWAY)
    return state.with_node(away).with_deadline(Deadline.AWAY.of(node.node), at + AWAY_GRACE_S)
