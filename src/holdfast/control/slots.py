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
        evicted=False,
        incarnation="",
        generation=node.generation + 1,
    )


def expect(job: Job, state: State, node: NodeState) -> State:
    """A node was asked for, or made: it has its time to join."""
    until = node.since + job.recovery.join_deadline_s
    key = Deadline.STANDBY.of(node.node) if node.replica is None else Deadline.JOIN.of(node.replica)
    return state.with_node(node).with_deadline(key, min(until, state.deadlines.get(key, until)))


def requested(node: NodeState, at: float, reason: str = "") -> Record:
    """Write down that a slot is to be filled."""
    standby = node.replica is None
    asked = NodeRequested(at=at, node=node.node, generation=node.generation, reason=reason, standby=standby)
    return Record(event=asked)


def asked_again(emptied: tuple[NodeState, ...], at: float, reason: str) -> Commands:
    """Write down, and have done, that these slots are filled again."""
    records = (requested(node, at, reason) for node in emptied)
    return (*records, *(ReplaceNode(place=node.place, reason=reason) for node in emptied))
