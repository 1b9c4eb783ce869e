"""Owns which code an attempt runs while an update is on its way: the former, the new one on trial, or the former again.

Pure questions and changes of a state; course.py and updates.py act on them.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.policy import FAULT_SIGNALS, Failure, FailureKind
from holdfast.control.state import Deadline, NodeState, ReplicaState, State
from holdfast.events import UpdateEnded, UpdateOutcome
from holdfast.findings import Finding

TRIAL_STEPS = 10
"""Steps for which new code is on trial: if it fails within them, the former goes on in its place."""

_ITS_OWN = (FailureKind.CRASHED, FailureKind.NOT_STARTED, FailureKind.HUNG, FailureKind.OUT_OF_MEMORY)


def with_code(state: State, replica: ReplicaState, members: tuple[NodeState, ...]) -> ReplicaState:
    """A replica with the code that its next attempt, of these members, runs."""
    update = state.update
    if update is None:
        return replace(replica, code=state.code, trial=None)
    if replica.trial is not None or not update.is_had_by(node.node for node in members):
        return replace(replica, code=replica.code if replica.trial is not None else state.code)
    return replace(replica, code=update.code, trial=replica.step)


def is_to_blame(state: State, replica: ReplicaState, failure: Failure) -> bool:
    """Whether a failure is laid to code on trial, and there is former code to go back to."""
    if replica.trial is None or state.update is None or state.update.code is None:
        return False
    by_signal = failure.kind is FailureKind.KILLED and failure.code in FAULT_SIGNALS
    return failure.kind in _ITS_OWN or by_signal


def is_settled(state: State) -> bool:
    """Whether every replica that is at work has made its steps with the new code."""
    at_work = state.at_work
    return bool(at_work) and all(
        replica.trial is not None and replica.step >= replica.trial + TRIAL_STEPS for replica in at_work
    )


def ended(state: State, outcome: UpdateOutcome, at: float, finding: Finding | None = None) -> tuple[State, UpdateEnded]:
    """The state without its update, and what is written down of that."""
    update = state.update
    assert update is not None, "an update ends once"
    applied = outcome is UpdateOutcome.APPLIED
    event = UpdateEnded(
        at=at,
        digest=update.code.digest if update.code else "",
        former=state.code.digest if state.code else "",
        outcome=outcome,
        step=max(replica.step for replica in state.replicas),
        finding=finding,
    )
    for replica in state.replicas:
        state = state.with_replica(replace(replica, trial=None))
    state = replace(state, update=None, code=update.code if applied else state.code)
    return state.with_deadline(Deadline.UPDATE.of(0), None), event


def shared(state: State, replica: ReplicaState, at: float) -> State:
    """Of several replicas the others follow one that runs an update's code: two versions must not average gradients."""
    if not state.several or state.update is None or replica.trial is None or state.update.due is not None:
        return state
    return replace(state, update=replace(state.update, due=at)).with_deadline(Deadline.UPDATE.of(0), at)
