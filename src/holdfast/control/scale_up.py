"""Adds returned nodes to a running replica: its ranks checkpoint and exit, and more ranks start.

No step is lost if ranks take a checkpoint on request. Other ranks are stopped after their next checkpoint, or once
`nodes.scale_up_timeout_s` is over. policy.py limits how often a run may add nodes.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.commands import CheckpointAndExit, RecordEvent
from holdfast.control.lifecycle import stop_replica
from holdfast.control.policy import EXIT_GRACE_S, scale_up_due
from holdfast.control.state import NodeState, ReplicaPhase, State, Timer, Transition
from holdfast.events import CheckpointCommitted, FindingRaised
from holdfast.findings import Finding, Severity
from holdfast.job.spec import Job


def maybe_scale_up(job: Job, state: State, index: int, at: float) -> Transition:
    """Add nodes, now or when due, if a replica has spare nodes and no other is on its way."""
    replica = state.replicas[index]
    if state.ending or replica.phase is not ReplicaPhase.RUNNING or replica.exit_requested:
        return state, ()
    if not state.ready_nodes & replica.slots:
        return state, ()
    nodes = state.nodes_of(index)
    fresh = tuple(node for node in nodes if node.is_ready and node.node not in replica.members)
    if not fresh or any(node.is_expected for node in nodes):
        return state, ()
    due = scale_up_due(replica.scale_ups, at, job.recovery.restart_window_s)
    if at < due:
        return state.with_timer(Timer.SCALE_UP.key(index), due), ()
    state = state.with_replica(replace(replica, exit_requested=True))
    state = state.with_timer(Timer.EXIT.key(index), at + job.nodes.scale_up_timeout_s)
    found = _scale_up_finding(job, fresh, len(replica.members) + len(fresh), len(nodes))
    return state, (RecordEvent(event=FindingRaised(at=at, finding=found)), checkpoint_and_exit(replica.members))


def checkpoint_and_exit(nodes: tuple[int, ...]) -> CheckpointAndExit:
    """Request that the ranks of these nodes checkpoint and exit."""
    return CheckpointAndExit(nodes=nodes, reason="the run resumes with more nodes")


def checkpoint_committed(job: Job, state: State, event: CheckpointCommitted) -> Transition:
    """Handle a checkpoint: ranks that were requested to exit have `EXIT_GRACE_S` to do so."""
    replica = state.replicas[event.replica]
    if not replica.exit_requested or event.attempt != replica.attempt or replica.phase is not ReplicaPhase.RUNNING:
        return state, ()
    return shorten_exit_timeout(state, event.replica, event.at), ()


def shorten_exit_timeout(state: State, index: int, at: float) -> State:
    """Limit the remaining wait for a replica that is exiting."""
    key = Timer.EXIT.key(index)
    return state.with_timer(key, min(state.timers.get(key, at + EXIT_GRACE_S), at + EXIT_GRACE_S))


def on_exit_timeout(job: Job, state: State, index: int, at: float) -> Transition:
    """A replica has not exited on request: stop its ranks."""
    replica = state.replicas[index]
    if not replica.exit_requested or replica.phase is not ReplicaPhase.RUNNING:
        return state, ()
    return stop_replica(job, state, index, at)


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
