"""Owns how a replica that runs takes in a node that came back: ranks leave after a checkpoint, and more start again.

No step is lost where ranks take a checkpoint when asked. Others are stopped after their next one, and at last when
`nodes.grow_within_s` is over. How often a run may grow is policy's.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.commands import Record, WindDown
from holdfast.control.course import halt
from holdfast.control.policy import LEAVE_S, growth_due
from holdfast.control.state import Deadline, NodeState, ReplicaPhase, State, Transition
from holdfast.events import CheckpointCommitted, FindingRaised
from holdfast.findings import Finding, Severity
from holdfast.job.spec import Job


def consider(job: Job, state: State, index: int, at: float) -> Transition:
    """Grow, now or when it is time, if a replica has nodes to spare and no other is on its way."""
    replica = state.replicas[index]
    if state.ending or replica.phase is not ReplicaPhase.RUNNING or replica.winding_down:
        return state, ()
    if not state.ready & replica.slots:
        return state, ()
    nodes = state.nodes_of(index)
    fresh = tuple(node for node in nodes if node.ready and node.node not in replica.members)
    if not fresh or any(node.coming for node in nodes):
        return state, ()
    due = growth_due(replica.growths, at, job.recovery.window_s)
    if at < due:
        return state.with_deadline(Deadline.GROW.of(index), due), ()
    state = state.with_replica(replace(replica, winding_down=True))
    state = state.with_deadline(Deadline.LEAVE.of(index), at + job.nodes.grow_within_s)
    found = _growing(job, fresh, len(replica.members) + len(fresh), len(nodes))
    return state, (Record(event=FindingRaised(at=at, finding=found)), wind_down(replica.members))


def wind_down(nodes: tuple[int, ...]) -> WindDown:
    """Ask the ranks of these nodes to leave after a checkpoint."""
    return WindDown(nodes=nodes, reason="the run goes on with more nodes")


def checkpoint_committed(job: Job, state: State, event: CheckpointCommitted) -> Transition:
    """A checkpoint is there: ranks that were asked to leave have a moment to do so by themselves."""
    replica = state.replicas[event.replica]
    if not replica.winding_down or event.attempt != replica.attempt or replica.phase is not ReplicaPhase.RUNNING:
        return state, ()
    return hurry(state, event.replica, event.at), ()


def hurry(state: State, index: int, at: float) -> State:
    """What holds up a replica that is leaving is not waited for much longer."""
    key = Deadline.LEAVE.of(index)
    return state.with_deadline(key, min(state.deadlines.get(key, at + LEAVE_S), at + LEAVE_S))


def not_left(job: Job, state: State, index: int, at: float) -> Transition:
    """A replica that was asked to leave has not: its ranks are told to end."""
    replica = state.replicas[index]
    if not replica.winding_down or replica.phase is not ReplicaPhase.RUNNING:
        return state, ()
    return halt(job, state, index, at)


def _growing(job: Job, fresh: tuple[NodeState, ...], after: int, full: int) -> Finding:
    names = ", ".join(f"node{node.node}" for node in fresh)
    return Finding(
        code="world-growing",
        severity=Severity.INFO,
        what=f"{names} can take part: after a checkpoint the ranks start again on {after} of {full} nodes",
        where=names,
        remedy=f"Nothing: ranks without a holdfast.train Session are stopped within {job.nodes.grow_within_s:g} s.",
    )
