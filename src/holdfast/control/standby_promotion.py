"""Promotes standbys to missing nodes; pure, used by lifecycle.py and node_handlers.py.

Two slots swap roles: the standby's slot gets the replica and node rank of the missing node's, so that ranks keep their
numbers; the other slot becomes a standby's once refilled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast.control.commands import Commands, PrepareNode, RecordEvent
from holdfast.control.node_slots import arm_join_timeout
from holdfast.control.state import NodeState, ReplicaPhase, ReplicaState, State
from holdfast.events import StandbyPromoted
from holdfast.job.spec import Job


def promote_standbys(job: Job, state: State, at: float) -> tuple[State, Commands, tuple[int, ...]]:
    """Put ready standbys in place of missing nodes; returns the commands and the replicas that gained a node."""
    if state.ending or not state.ready_standbys & state.ready_nodes:
        return state, (), ()
    commands: Commands = ()
    gained: dict[int, None] = {}
    for replica in state.replicas:
        for missing in _replaceable(state, replica):
            waiting = state.ready_standbys & state.ready_nodes
            if not waiting:
                break
            standby = state.nodes[(waiting & -waiting).bit_length() - 1]
            state = _swap_roles(job, state, standby, missing, replica.replica)
            promoted = StandbyPromoted(at=at, node=standby.node, replaces=missing.node, replica=replica.replica)
            commands = (*commands, RecordEvent(event=promoted))
            gained[replica.replica] = None
    return state, commands, tuple(gained)


def prepare_standby(state: State, node: int) -> Commands:
    """Have a joined standby prepare, unless it is ready."""
    return () if state.ready_standbys >> node & 1 else (PrepareNode(node=node),)


def _replaceable(state: State, replica: ReplicaState) -> Iterator[NodeState]:
    """Slots of a replica that a standby may take.

    Not a slot whose former ranks may still live, and at first not one whose node is on its way: it was requested no
    later.
    """
    if replica.phase is ReplicaPhase.DONE:
        return
    absent = replica.slots & ~state.ready_nodes & ~state.nodes_with_processes
    while absent:
        node = state.nodes[(absent & -absent).bit_length() - 1]
        absent &= absent - 1
        if node.is_missing and not node.maybe_alive and (node.generation > 0 or not node.is_expected):
            yield node


def _swap_roles(job: Job, state: State, standby: NodeState, missing: NodeState, replica: int) -> State:
    state = state.with_ready_standby(standby.node, False)
    state = state.with_node(replace(standby, replica=replica, node_rank=missing.node_rank))
    state = arm_join_timeout(job, state, replace(missing, replica=None, node_rank=standby.node_rank))
    known = state.replicas[replica]
    slots = known.slots & ~(1 << missing.node) | 1 << standby.node
    return state.with_replica(replace(known, slots=slots))
