"""Rolls out new code in a run: nodes download it first, then ranks transfer their state and restart with it.

code_versions.py decides which code an attempt runs; lifecycle.py rolls back code that fails soon.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control import code_versions
from holdfast.control.commands import CheckpointAndExit, Commands, FetchCode, FreeState, RecordEvent
from holdfast.control.lifecycle import stop_replica
from holdfast.control.state import NodePhase, NodeState, ReplicaPhase, ReplicaState, State, Timer, Transition, Update
from holdfast.events import CodeFetched, FindingRaised, UpdateOutcome, UpdateRequested
from holdfast.findings import Finding, Severity
from holdfast.job.run_spec import CodeArchive
from holdfast.job.spec import Job

STATE_TRANSFER_S, STATE_TRANSFER_STEPS = 60.0, 10
"""Maximum seconds, and maximum steps, that ranks have to finish their step and transfer their state."""

REASON = "the run resumes with other code"


def update_requested(job: Job, state: State, event: UpdateRequested) -> Transition:
    """Handle an update request: nodes download the code first. It replaces an update that has not begun."""
    if state.ending:
        return state, ()
    if state.update is not None and _has_started(state):
        return state, (RecordEvent(event=FindingRaised(at=event.at, finding=_under_way_finding(state.update))),)
    shipped = CodeArchive(digest=event.digest, bytes=event.bytes, files=event.files, cwd=event.cwd)
    due = None if event.after_s is None else event.at + event.after_s
    update = Update(code=shipped if event.digest else None, due=due)
    state = replace(state, update=update).with_timer(Timer.UPDATE.key(0), due)
    if update.code is None:
        return advance_rollout(job, state, event.at)
    return state, (fetch_command(update, tuple(node.node for node in state.nodes if node.phase is NodePhase.JOINED)),)


def fetch_command(update: Update, nodes: tuple[int, ...]) -> FetchCode:
    """Have these nodes download the code of an update."""
    assert update.code is not None, "code in place needs no download"
    return FetchCode(nodes=nodes, digest=update.code.digest)


def code_fetched(job: Job, state: State, event: CodeFetched) -> Transition:
    """Handle a node that has the code, or failed to download it: then nothing is stopped for it."""
    update = state.update
    if update is None or update.code is None or update.code.digest != event.digest or _has_started(state):
        return state, ()
    if event.failure is not None:
        state, ended = code_versions.update_ended(state, UpdateOutcome.ABANDONED, event.at, event.failure)
        return state, (RecordEvent(event=ended),)
    state = replace(state, update=replace(update, fetched_by=update.fetched_by | 1 << event.node))
    return advance_rollout(job, state, event.at)


def on_node_joined(state: State, node: NodeState) -> Transition:
    """Handle a joined node: without the update's code, it downloads the code when its ranks start."""
    update = state.update
    if update is None or update.code is None or update.is_fetched_by((node.node,)):
        return state, ()
    if update.fetched_by:
        return replace(state, update=replace(update, fetched_by=update.fetched_by | 1 << node.node)), ()
    return state, (fetch_command(update, (node.node,)),)


def on_update_timeout(job: Job, state: State, index: int, at: float) -> Transition:
    """No restart came in time: stop the ranks for the update."""
    return advance_rollout(job, state, at)


def advance_rollout(job: Job, state: State, at: float) -> Transition:
    """Have the ranks exit for the new code, once it is due and all their nodes have it."""
    update = state.update
    if update is None or update.due is None or at < update.due:
        return state, ()
    leaving = [
        replica
        for replica in state.replicas
        if replica.phase is ReplicaPhase.RUNNING and replica.rollout_base_step is None
    ]
    if not all(update.is_fetched_by(replica.members) for replica in leaving):
        return state, ()
    commands: Commands = ()
    for replica in leaving:
        if not replica.exit_requested:
            state, more = _stop_for_update(job, state, replica, at)
            commands = (*commands, *more)
    return state, commands


def _stop_for_update(job: Job, state: State, replica: ReplicaState, at: float) -> Transition:
    """Ranks that report steps transfer their state; others are stopped."""
    state = state.with_replica(replace(replica, exit_requested=True, transfers_state=replica.has_stepped))
    if not replica.has_stepped:
        found = FindingRaised(at=at, finding=_state_transfer_skipped(replica))
        state, commands = stop_replica(job, state, replica.replica, at)
        return state, (RecordEvent(event=found), *commands)
    longest_s = STATE_TRANSFER_S + STATE_TRANSFER_STEPS * (replica.step_rate.step_s or 0.0)
    return state.with_timer(Timer.EXIT.key(replica.replica), at + longest_s), (transfer_and_exit(replica.members),)


def transfer_and_exit(nodes: tuple[int, ...]) -> CheckpointAndExit:
    """Request that the ranks of these nodes keep their state in memory and exit."""
    return CheckpointAndExit(nodes=nodes, reason=REASON, transfer_state=True)


def settle_update(state: State, at: float) -> Transition:
    """After a step: end the update if the new code has made enough steps; from then on there is no rollback."""
    if state.update is None or not code_versions.is_settled(state):
        return state, ()
    state, ended = code_versions.update_ended(state, UpdateOutcome.APPLIED, at)
    joined = (node for node in state.nodes if node.phase is NodePhase.JOINED)
    releases = (FreeState(node=node.node, replica=node.replica) for node in joined if node.replica is not None)
    return state, (RecordEvent(event=ended), *releases)


def _has_started(state: State) -> bool:
    return any(replica.rollout_base_step is not None or replica.transfers_state for replica in state.replicas)


def _under_way_finding(update: Update) -> Finding:
    digest = update.code.digest if update.code else "in place"
    return Finding(
        code="update-in-progress",
        severity=Severity.WARNING,
        what="an update is under way, and another is not begun before it is over",
        where="holdfast update",
        evidence=(f"code {digest}",),
        remedy=f"Try again once it has made {code_versions.TRIAL_STEPS} steps; `holdfast events` says when.",
    )


def _state_transfer_skipped(replica: ReplicaState) -> Finding:
    return Finding(
        code="state-transfer-skipped",
        severity=Severity.WARNING,
        what="the ranks have reported no step since their start, so the update stops them without a state transfer",
        where=f"attempt {replica.attempt}",
        remedy="Nothing where they save their own checkpoints: they resume from the last. With a holdfast.train "
        "Session they would resume from the step they are at.",
    )
