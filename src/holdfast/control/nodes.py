"""Owns what follows from nodes and their agents: they join, leave, are lost, and their slots are filled again."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control import drills, growth, standby, updates, world
from holdfast.control.commands import Commands, Finish, Record, ReplaceNode, SubmitNodes, TellLost
from holdfast.control.course import halt, look, parted, proceed, start, stop, stop_busy
from holdfast.control.policy import HEADWAY_STEPS, JUDGE_S, Failure, FailureKind, never_joined
from holdfast.control.slots import asked_again, emptied, expect, requested
from holdfast.control.state import Deadline, NodePhase, NodeState, ReplicaPhase, ReplicaState, State, Transition
from holdfast.events import (
    AgentJoined,
    AgentLeft,
    ControllerStarted,
    FindingRaised,
    NodeEvicted,
    NodeGone,
    NodeLeaving,
    NodeMade,
    NodeUnavailable,
    StandbyReady,
)
from holdfast.job.silence import Silence
from holdfast.job.spec import Job


def controller_started(job: Job, state: State, event: ControllerStarted) -> Transition:
    """No connection survives a controller: every agent is away until it has joined this one, with its time anew."""
    if state.dismissing:
        return state, (Finish(),)
    missing = tuple(node for node in state.nodes if node.missing)
    for node in state.nodes:
        if not node.missing:
            state = _away(job, state, node, event.at)
    state, commands = _ask_again(job, state, missing, event.at)
    for replica in state.replicas:
        if replica.phase is ReplicaPhase.JUDGING:
            state = state.with_deadline(Deadline.JUDGE.of(replica.replica), event.at + JUDGE_S)
        elif replica.phase is ReplicaPhase.STOPPING:
            state = state.with_deadline(Deadline.STOP.of(replica.replica), None)
            state, more = stop_busy(job, state, replica.replica, event.at)
            commands = (*commands, *more)
        elif Deadline.WAIT.of(replica.replica) in state.deadlines:
            state = state.with_deadline(Deadline.WAIT.of(replica.replica), event.at + job.nodes.wait_s)
    return state, commands


def _ask_again(job: Job, state: State, missing: tuple[NodeState, ...], at: float) -> Transition:
    """Ask for the nodes that are needed and not there: whether they were asked for before is not known."""
    if state.ending:
        return state, ()
    done = {replica.replica for replica in state.replicas if replica.phase is ReplicaPhase.DONE}
    waiting = tuple(node.place for node in missing if node.replica not in done)
    for place in waiting:
        state = expect(job, state, replace(state.nodes[place.node], phase=NodePhase.REQUESTED, since=at))
    fresh = tuple(place for place in waiting if place.generation == 0)
    again = "the controller was replaced before this was known to be done"
    return state, (
        *drills.cordons(state),
        *(requested(state.nodes[place.node], at) for place in waiting),
        *((SubmitNodes(places=fresh),) if fresh else ()),
        *(ReplaceNode(place=place, reason=again) for place in waiting if place.generation > 0),
    )


def node_made(job: Job, state: State, event: NodeMade) -> Transition:
    """A node exists, and nothing of its former one; from now on its agent has its time to join."""
    node = state.nodes[event.node]
    if event.generation != node.generation or not node.missing or _unwanted(state, node.replica):
        return state, ()
    state = _awaiting_the_rest(job, state, node, event.at)
    state = expect(job, state, replace(node, phase=NodePhase.MADE, since=event.at, haunted=False))
    return _go_on(job, state, node.replica, event.at)


def _awaiting_the_rest(job: Job, state: State, node: NodeState, at: float) -> State:
    """The first node to come after a time in which none was there has the others waited for: a gang comes together."""
    if not job.nodes.elastic or node.replica is None or Deadline.WAIT.of(node.replica) in state.deadlines:
        return state
    awaited = (NodePhase.REQUESTED, NodePhase.UNAVAILABLE)
    if any(other.phase not in awaited for other in state.nodes_of(node.replica)):
        return state
    return state.with_deadline(Deadline.WAIT.of(node.replica), at + job.nodes.wait_s)


def node_unavailable(job: Job, state: State, event: NodeUnavailable) -> Transition:
    """A node cannot be had, and nothing is left of its former one; it comes, unasked, when it can."""
    node = state.nodes[event.node]
    if event.generation != node.generation or not node.missing:
        return state, ()
    state = state.with_node(replace(node, phase=NodePhase.UNAVAILABLE, reason=event.reason, haunted=False))
    return _go_on(job, state, node.replica, event.at)


def _go_on(job: Job, state: State, replica: int | None, at: float) -> Transition:
    """Have standbys take what places they can, and replicas do what they may have waited for."""
    state, commands, gained = standby.promote(job, state, at)
    for index in dict.fromkeys((*gained, *(() if replica is None else (replica,)))):
        state, more = proceed(job, state, index, at)
        state, grown = growth.consider(job, state, index, at)
        commands = (*commands, *more, *grown)
    return state, commands


def agent_joined(job: Job, state: State, event: AgentJoined) -> Transition:
    """A node is there (again): give it whatever it has missed."""
    node = state.nodes[event.node]
    if event.generation != node.generation:
        return state, ()
    another = node.incarnation != event.incarnation
    reborn = node.busy and bool(node.incarnation) and another
    node = replace(
        node,
        phase=NodePhase.JOINED,
        reason="",
        doubted=False,
        haunted=False,
        incarnation=event.incarnation,
        address=event.address,
        port=event.port,
        busy=node.busy and not reborn,
    )
    state = state.with_node(node).with_deadline(Deadline.AWAY.of(node.node), None)
    commands: Commands = drills.pending(job, state, node.node)
    if reborn:
        reason = "its agent was restarted, and ranks die with their agent"
        state, more = fail(job, state, (node,), event.at, reason)
        return state, (*commands, *more)
    state, fetching = updates.joined(state, node)
    if node.replica is None:
        state = state.with_prepared(node.node, False) if another else state
        prepare = standby.prepare(state, node.node)
        state, more = _go_on(job, state, None, event.at)
        return state, (*commands, *fetching, *prepare, *more)
    replica = state.replicas[node.replica]
    match replica.phase:
        case ReplicaPhase.RUNNING | ReplicaPhase.JUDGING if event.attempt < replica.attempt and node.busy:
            commands = (start(replica, (node,)), *commands)
        case ReplicaPhase.JUDGING if node.busy:
            commands = (*commands, look(replica, (node,)))
        case ReplicaPhase.STOPPING | ReplicaPhase.GATHERING | ReplicaPhase.DONE if node.busy:
            commands = (*commands, stop(replica, (node,), state.ending.grace_s if state.ending else 0.0))
        case ReplicaPhase.RUNNING if replica.winding_down and node.busy:
            asked = updates.hand_over if replica.hands_over else growth.wind_down
            commands = (*commands, asked((node.node,)))
        case _:
            pass
    if replica.at_work:
        commands = (*commands, *_missed(state, node))
    state, more = _go_on(job, state, node.replica, event.at)
    return state, (*commands, *fetching, *more)


def standby_ready(job: Job, state: State, event: StandbyReady) -> Transition:
    """A standby can take a place from now on; one that never says so never does."""
    node = state.nodes[event.node]
    if event.generation != node.generation or node.replica is not None:
        return state, ()
    return _go_on(job, state.with_prepared(node.node, True), None, event.at)


def _missed(state: State, node: NodeState) -> Commands:
    """What befell other replicas while this node was out of reach; ranks that know it already are told twice."""
    return tuple(
        TellLost(replica=other.replica, attempt=other.attempt, nodes=(node.node,))
        for other in state.replicas
        if other.attempt >= 0
        and other.phase in (ReplicaPhase.STOPPING, ReplicaPhase.GATHERING)
        and not state.attends(other)
    )


def agent_left(job: Job, state: State, event: AgentLeft) -> Transition:
    """A connection closed: its node has a while to come back."""
    node = state.nodes[event.node]
    if event.generation != node.generation or event.incarnation != node.incarnation:
        return state, ()
    return _away(job, state, node, event.at), ()


def node_gone(job: Job, state: State, event: NodeGone) -> Transition:
    """The back end says that a node is no more."""
    node = state.nodes[event.node]
    if event.generation != node.generation:
        return state, ()
    return lose(job, state, (node,), event.at, event.reason, buried=True)


def node_evicted(job: Job, state: State, event: NodeEvicted) -> Transition:
    """The queue takes a node back: what this ends, or has just ended, costs no restart."""
    node = state.nodes[event.node]
    if event.generation != node.generation:
        return state, ()
    state = state.with_node(node.but(evicted=True))
    if node.replica is None or node.missing:  # one that never joined has no part in earlier failures
        return state, ()
    replica = state.replicas[node.replica]
    losses = tuple(replace(loss, evicted=loss.evicted or loss.node == node.node) for loss in replica.losses)
    known = replica.failures
    if known and known[-1].attempt == replica.attempt and _is_of(known[-1], node):
        known = (*known[:-1], replace(known[-1], evicted=True))
    return state.with_replica(replace(replica, losses=losses, failures=known)), ()


def _is_of(failure: Failure, node: NodeState) -> bool:
    return failure.kind in (FailureKind.NODE_LOST, FailureKind.NODE_PREEMPTED) and failure.node == node.node


def node_leaving(job: Job, state: State, event: NodeLeaving) -> Transition:
    """A node will be gone soon: its replica's ranks, all of them healthy, have their grace to save and end."""
    node = state.nodes[event.node]
    if node.phase is not NodePhase.JOINED:
        return state, ()
    state = _away(job, state, node, event.at + event.grace_s)
    if state.ending or node.replica is None or not node.busy or not state.replicas[node.replica].at_work:
        return state, ()
    reason = f"its agent got SIGTERM; ranks had {event.grace_s:g} s to save and end (recovery.stop_grace_s)"
    return fail(job, state, (state.nodes[node.node],), event.at, reason, kind=FailureKind.NODE_PREEMPTED)


def lose(
    job: Job,
    state: State,
    nodes: tuple[NodeState, ...],
    at: float,
    reason: str,
    *,
    kind: FailureKind = FailureKind.NODE_LOST,
    failed_at: float | None = None,
    buried: bool = False,
) -> Transition:
    """Nodes of a replica are lost: what ran on them, or was about to, has failed; their slots are filled again.

    `buried` says that nothing of them is left.
    """
    gone = tuple(emptied(node, at, reason, haunted=node.busy and not buried) for node in nodes)
    for node in gone:
        state = expect(job, state, node).with_deadline(Deadline.AWAY.of(node.node), None)
        state = state.with_prepared(node.node, False)
    if nodes[0].replica is None:
        return state, () if state.ending else asked_again(gone, at, reason)
    state, promoted, _ = standby.promote(job, state, at)
    replica = state.replicas[nodes[0].replica]
    if not all(node.missing for node in nodes):
        state = state.with_deadline(Deadline.WAIT.of(replica.replica), at + job.nodes.wait_s)
    gone = tuple(state.nodes[node.node] for node in gone)
    if state.ending or replica.phase is ReplicaPhase.DONE:
        return proceed(job, state, replica.replica, at)
    needed = _needed(job, state, nodes)
    state = _disrupted(state, replica.replica, nodes, anew=needed and replica.phase is ReplicaPhase.GATHERING)
    if needed:
        state, commands = fail(job, state, nodes, at, reason, kind=kind, failed_at=failed_at)
    else:
        state, commands = proceed(job, state, replica.replica, at)
    if state.ending:
        return state, commands
    state, more = growth.consider(job, state, replica.replica, at)
    return state, (*promoted, *commands, *asked_again(gone, at, reason), *more)


def _needed(job: Job, state: State, nodes: tuple[NodeState, ...]) -> bool:
    """Whether the loss of these nodes, as they were, is a failure of their replica and not only of theirs.

    Nodes that are lost while their replica is down for a failure belong to that one, unless a slot is lost again.
    """
    replica = _replica_of(state, nodes)
    match replica.phase:
        case ReplicaPhase.RUNNING | ReplicaPhase.JUDGING:
            return any(node.busy for node in nodes)
        case ReplicaPhase.STOPPING:
            return any(node.node in replica.members for node in nodes)
        case _:
            there = [node for node in state.nodes_of(replica.replica) if not node.missing]
            if job.nodes.elastic and len(there) >= world.least(job, state):
                return False
            known = replica.failures
            down = bool(known) and known[-1].attempt == replica.attempt
            return not down or any(replica.lost >> node.node & 1 for node in nodes)


def _disrupted(state: State, index: int, nodes: tuple[NodeState, ...], *, anew: bool) -> State:
    """Remember which slots were lost while no attempt could run; `anew` starts another disruption."""
    replica = state.replicas[index]
    if replica.at_work and not any(node.busy for node in nodes):
        return state  # its attempt goes on without them
    lost = sum(1 << node.node for node in nodes)
    return state.with_replica(replace(replica, lost=lost if anew else replica.lost | lost))


def fail(
    job: Job,
    state: State,
    nodes: tuple[NodeState, ...],
    at: float,
    reason: str,
    *,
    kind: FailureKind = FailureKind.NODE_LOST,
    failed_at: float | None = None,
) -> Transition:
    """What ran on these nodes is gone, so their replica fails."""
    replica = _replica_of(state, nodes)
    state, told = parted(state, replica.replica)
    in_time = kind is FailureKind.NODE_PREEMPTED and job.recovery.stop_grace_s > 0
    leaves = state.several and in_time and replica.phase is ReplicaPhase.RUNNING  # one that hangs is not waited for
    losses = tuple(
        Failure(
            kind=kind,
            at=at if failed_at is None else failed_at,
            node=node.node,
            attempt=replica.attempt,
            error=reason,
            step=replica.step,
            headway=replica.steps >= HEADWAY_STEPS,
            lived_s=at - replica.started_at,
            evicted=node.evicted,
        )
        for node in nodes
    )
    state = state.with_replica(replace(replica, losses=(*replica.losses, *losses), leaves=leaves))
    state, commands = halt(job, state, replica.replica, at)
    return state, (*told, *commands)


def _replica_of(state: State, nodes: tuple[NodeState, ...]) -> ReplicaState:
    """The replica that these nodes are, or were, a part of."""
    index = nodes[0].replica
    assert index is not None, f"node{nodes[0].node} is a standby, on which nothing runs"
    return state.replicas[index]


def out_of_reach(job: Job, state: State, index: int, at: float) -> Transition:
    """A node's time to come back is up."""
    reason = f"its agent has been out of reach for recovery.node_grace_s, {job.recovery.node_grace_s:g} s"
    return lose(job, state, (state.nodes[index],), at, reason, failed_at=at - _away_s(job))


def not_joined(job: Job, state: State, index: int, at: float) -> Transition:
    """Nodes that have not joined in time are made again; where too few are there without them, that is a failure."""
    patience_s = job.recovery.join_deadline_s
    expected = [node for node in state.nodes_of(index) if node.phase in (NodePhase.REQUESTED, NodePhase.MADE)]
    if not expected or _unwanted(state, index):
        return state, ()
    late = tuple(replace(node, doubted=True) for node in expected if at >= node.since + patience_s)
    if not late:
        until = min(node.since for node in expected) + patience_s
        return state.with_deadline(Deadline.JOIN.of(index), until), ()
    reason = f"no word from its agent for {patience_s:g} s"
    found = tuple(Record(event=FindingRaised(at=at, finding=never_joined(node.node, reason))) for node in late)
    state, commands = lose(job, state, late, at, reason, kind=FailureKind.NEVER_JOINED)
    return state, (*found, *commands)


def standby_not_joined(job: Job, state: State, index: int, at: float) -> Transition:
    """A standby that has not joined in time is made again; nothing has waited for it."""
    node, patience_s = state.nodes[index], job.recovery.join_deadline_s
    if node.replica is not None or node.phase not in (NodePhase.REQUESTED, NodePhase.MADE) or state.ending:
        return state, ()
    if at < node.since + patience_s:
        return expect(job, state, node), ()
    reason = f"no word from its agent for {patience_s:g} s"
    state, commands = lose(job, state, (node,), at, reason, kind=FailureKind.NEVER_JOINED)
    return state, (Record(event=FindingRaised(at=at, finding=never_joined(node.node, reason))), *commands)


def _unwanted(state: State, replica: int | None) -> bool:
    done = replica is not None and state.replicas[replica].phase is ReplicaPhase.DONE
    return state.ending is not None or done


def stubborn(job: Job, state: State, index: int, at: float) -> Transition:
    """A replica's time to end its ranks is up."""
    busy = tuple(node for node in state.nodes_of(index) if node.busy)
    return lose(job, state, busy, at, "it could not end its ranks in time")


def _away(job: Job, state: State, node: NodeState, at: float) -> State:
    away = node.but(phase=NodePhase.AWAY)
    return state.with_node(away).with_deadline(Deadline.AWAY.of(node.node), at + _away_s(job))


def _away_s(job: Job) -> float:
    return Silence(node_grace_s=job.recovery.node_grace_s).away_s
