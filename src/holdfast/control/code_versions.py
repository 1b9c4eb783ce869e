"""Which code an attempt runs during an update: the previous code, the new code on trial, or the previous code again.

Pure questions and changes of a state; lifecycle.py and rollout.py act on them.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.policy import CRASH_SIGNALS, Failure, FailureKind
from holdfast.control.state import NodeState, ReplicaState, State, Timer
from holdfast.events import UpdateEnded, UpdateOutcome
from holdfast.findings import Finding

TRIAL_STEPS = 10
"""Steps for which new code is on trial: if it fails within them, the run rolls back to the previous code."""

_PROGRAM_FAILURES = (FailureKind.CRASHED, FailureKind.NOT_STARTED, FailureKind.HUNG, FailureKind.OUT_OF_MEMORY)


def with_code(state: State, replica: ReplicaState, members: tuple[NodeState, ...]) -> ReplicaState:
    """A replica with the code that its next attempt, of these members, runs."""
    update = state.update
    if update is None:
        return replace(replica, code=state.code, rollout_base_step=None)
    if replica.rollout_base_step is not None or not update.is_fetched_by(node.node for node in members):
        return replace(replica, code=replica.code if replica.rollout_base_step is not None else state.code)
    return replace(replica, code=update.code, rollout_base_step=replica.highest_step)


def is_rollout_failure(state: State, replica: ReplicaState, failure: Failure) -> bool:
    """Whether a failure is attributed to code on trial, and there is previous code to roll back to."""
    if replica.rollout_base_step is None or state.update is None or state.update.code is None:
        return False
    by_signal = failure.kind is FailureKind.KILLED and failure.code in CRASH_SIGNALS
    return failure.kind in _PROGRAM_FAILURES or by_signal


def is_settled(state: State) -> bool:
    """Whether every running replica has made its trial steps with the new code."""
    at_work = state.running_replicas
    return bool(at_work) and all(
        replica.rollout_base_step is not None and replica.highest_step >= replica.rollout_base_step + TRIAL_STEPS
        for replica in at_work
    )


def update_ended(
    state: State, outcome: UpdateOutcome, at: float, finding: Finding | None = None
) -> tuple[State, UpdateEnded]:
    """The state without its update, and the event to log."""
    update = state.update
    assert update is not None, "an update ends once"
    applied = outcome is UpdateOutcome.APPLIED
    event = UpdateEnded(
        at=at,
        digest=update.code.digest if update.code else "",
        previous_digest=state.code.digest if state.code else "",
        outcome=outcome,
        step=max(replica.highest_step for replica in state.replicas),
        finding=finding,
    )
    for replica in state.replicas:
        state = state.with_replica(replace(replica, rollout_base_step=None))
    state = replace(state, update=None, code=update.code if applied else state.code)
    return state.with_timer(Timer.UPDATE.key(0), None), event


def with_update_due(state: State, replica: ReplicaState, at: float) -> State:
    """If one of several replicas runs an update's code, the others follow: two versions must not average gradients."""
    if (
        not state.has_replicas
        or state.update is None
        or replica.rollout_base_step is None
        or state.update.due is not None
    ):
        return state
    return replace(state, update=replace(state.update, due=at)).with_timer(Timer.UPDATE.key(0), at)
