"""Owns how a run takes other code in: nodes have it first, then ranks hand over what they have and start again with it.

Which code an attempt runs is versions.py's; that code which fails soon is taken back is decided where failures are
judged (course.py).
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control import versions
from holdfast.control.commands import Commands, Fetch, Record, Release, WindDown
from holdfast.control.course import halt
from holdfast.control.state import Deadline, NodePhase, NodeState, ReplicaPhase, ReplicaState, State, Transition, Update
from holdfast.events import CodeFetched, FindingRaised, UpdateOutcome, UpdateRequested
from holdfast.findings import Finding, Severity
from holdfast.job.accepted import Shipped
from holdfast.job.spec import Job

HAND_OVER_S, HAND_OVER_STEPS = 60.0, 10
"""Longest that ranks get to come to the end of their step and leave what they have, seconds and steps together."""

REASON = "the run goes on with other code"


def requested(job: Job, state: State, event: UpdateRequested) -> Transition:
    """Somebody wants other code to run: nodes have it first. One that has not begun gives way to a later one."""
    if state.ending:
        return state, ()
    if state.update is not None and _has_begun(state):
        return state, (Record(event=FindingRaised(at=event.at, finding=_under_way(state.update))),)
    shipped = Shipped(digest=event.digest, bytes=event.bytes, files=event.files, cwd=event.cwd)
    due = None if event.after_s is None else event.at + event.after_s
    update = Update(code=shipped if event.digest else None, due=due)
    state = replace(state, update=update).with_deadline(Deadline.UPDATE.of(0), due)
    if update.code is None:
        return advance(job, state, event.at)
    return state, (fetch(update, tuple(node.node for node in state.nodes if node.phase is NodePhase.JOINED)),)


def fetch(update: Update, nodes: tuple[int, ...]) -> Fetch:
    """Have these nodes fetch the code of an update."""
    assert update.code is not None, "code in place is there"
    return Fetch(nodes=nodes, digest=update.code.digest)


def fetched(job: Job, state: State, event: CodeFetched) -> Transition:
    """A node has the code, or cannot have it: then nothing is stopped for it."""
    update = state.update
    if update is None or update.code is None or update.code.digest != event.digest or _has_begun(state):
        return state, ()
    if event.problem is not None:
        state, ended = versions.ended(state, UpdateOutcome.GIVEN_UP, event.at, event.problem)
        return state, (Record(event=ended),)
    state = replace(state, update=replace(update, had_by=update.had_by | 1 << event.node))
    return advance(job, state, event.at)


def joined(state: State, node: NodeState) -> Transition:
    """A node is there (again): of code that others have, it will have its own when it is started with it."""
    update = state.update
    if update is None or update.code is None or update.is_had_by((node.node,)):
        return state, ()
    if update.had_by:
        return replace(state, update=replace(update, had_by=update.had_by | 1 << node.node)), ()
    return state, (fetch(update, (node.node,)),)


def is_due(job: Job, state: State, index: int, at: float) -> Transition:
    """No restart came in time: ranks are stopped for the update."""
    return advance(job, state, at)


def advance(job: Job, state: State, at: float) -> Transition:
    """Have the ranks leave for the new code, once it is time and all their nodes have it."""
    update = state.update
    if update is None or update.due is None or at < update.due:
        return state, ()
    leaving = [replica for replica in state.replicas if replica.phase is ReplicaPhase.RUNNING and replica.trial is None]
    if not all(update.is_had_by(replica.members) for replica in leaving):
        return state, ()
    commands: Commands = ()
    for replica in leaving:
        if not replica.winding_down:
            state, more = _leave(job, state, replica, at)
            commands = (*commands, *more)
    return state, commands


def _leave(job: Job, state: State, replica: ReplicaState, at: float) -> Transition:
    """Ranks that tell of steps hand over their state; of others nothing is known, and they are stopped."""
    state = state.with_replica(replace(replica, winding_down=True, hands_over=replica.stepped))
    if not replica.stepped:
        found = FindingRaised(at=at, finding=_nothing_handed_over(replica))
        state, commands = halt(job, state, replica.replica, at)
        return state, (Record(event=found), *commands)
    longest_s = HAND_OVER_S + HAND_OVER_STEPS * (replica.pace.step_s or 0.0)
    return state.with_deadline(Deadline.LEAVE.of(replica.replica), at + longest_s), (hand_over(replica.members),)


def hand_over(nodes: tuple[int, ...]) -> WindDown:
    """Ask the ranks of these nodes to leave their state in memory, and go."""
    return WindDown(nodes=nodes, reason=REASON, hand_over=True)


def settle(state: State, at: float) -> Transition:
    """After a step: the new code may have made enough of them, and there is no way back from then on."""
    if state.update is None or not versions.is_settled(state):
        return state, ()
    state, ended = versions.ended(state, UpdateOutcome.APPLIED, at)
    joined = (node for node in state.nodes if node.phase is NodePhase.JOINED)
    releases = (Release(node=node.node, replica=node.replica) for node in joined if node.replica is not None)
    return state, (Record(event=ended), *releases)


def _has_begun(state: State) -> bool:
    return any(replica.trial is not None or replica.hands_over for replica in state.replicas)


def _under_way(update: Update) -> Finding:
    digest = update.code.digest if update.code else "in place"
    return Finding(
        code="update-under-way",
        severity=Severity.WARNING,
        what="an update is under way, and another is not begun before it is over",
        where="holdfast update",
        evidence=(f"code {digest}",),
        remedy=f"Try again once it has made {versions.TRIAL_STEPS} steps; `holdfast events` says when.",
    )


def _nothing_handed_over(replica: ReplicaState) -> Finding:
    return Finding(
        code="nothing-handed-over",
        severity=Severity.WARNING,
        what="the ranks have told of no step since they were started, so they are stopped for the update as they are",
        where=f"attempt {replica.attempt}",
        remedy="Nothing where they save their own checkpoints: they go on from the last. With a holdfast.train Session "
        "they would go on from the step they are at.",
    )
