"""Owns how a node slot is emptied and filled again; pure, and below the course of attempts and the lives of nodes."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.commands import Commands, Record, ReplaceNode
from holdfast.control.state import Deadline, NodePhase, NodeState, State
from holdfast.events import NodeRequested
from holdfast.job.spec import Job


def emptied(node: NodeState, at: float, reason: str, *, haunted: bool) -> NodeState:
    """The slot of a lost node, for its next one."""
    return replace(
        node,
        phase=NodePhase.REQUESTED,
        since=at,
        reason=reason,
        haunted=haunted or node.haunted,
        busy=False,
        incarnation="",
        generation=node.generation + 1,
    )


def expect(job: Job, state: State, node: NodeState) -> State:
    """A node was asked for, or made: it has its time to join."""
    key, until = Deadline.JOIN.of(node.replica), node.since + job.recovery.join_deadline_s
    return state.with_node(node).with_deadline(key, min(until, state.deadlines.get(key, until)))


def asked_again(emptied: tuple[NodeState, ...], at: float, reason: str) -> Commands:
    """Write down, and have done, that these slots are filled again."""
    requests = (NodeRequested(at=at, node=node.node, generation=node.generation, reason=reason) for node in emptied)
    records = (Record(event=request) for request in requests)
    return (*records, *(ReplaceNode(place=node.place, reason=reason) for node in emptied))
