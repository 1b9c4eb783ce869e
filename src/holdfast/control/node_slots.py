"""Empties and refills node slots; pure, used by lifecycle.py and node_handlers.py."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.commands import Commands, RecordEvent, ReplaceNode
from holdfast.control.state import NodePhase, NodeState, State, Timer
from holdfast.events import NodeRequested
from holdfast.job.spec import Job


def next_generation(node: NodeState, at: float, reason: str, *, maybe_alive: bool) -> NodeState:
    """The slot of a lost node, with the next generation requested."""
    return replace(
        node,
        phase=NodePhase.REQUESTED,
        since=at,
        reason=reason,
        maybe_alive=maybe_alive or node.maybe_alive,
        has_processes=False,
        evicted=False,
        incarnation="",
        generation=node.generation + 1,
    )


def arm_join_timeout(job: Job, state: State, node: NodeState) -> State:
    """Start the join timeout of a node that was requested or created."""
    until = node.since + job.recovery.join_timeout_s
    key = Timer.STANDBY_JOIN.key(node.node) if node.replica is None else Timer.JOIN.key(node.replica)
    return state.with_node(node).with_timer(key, min(until, state.timers.get(key, until)))


def node_requested(node: NodeState, at: float, reason: str = "") -> RecordEvent:
    """Log that a node was requested."""
    standby = node.replica is None
    asked = NodeRequested(at=at, node=node.node, generation=node.generation, reason=reason, standby=standby)
    return RecordEvent(event=asked)


def request_again(slots: tuple[NodeState, ...], at: float, reason: str) -> Commands:
    """Log and execute requests to refill these slots."""
    records = (node_requested(node, at, reason) for node in slots)
    return (*records, *(ReplaceNode(node_id=node.node_id, reason=reason) for node in slots))
