"""Rolls out new code in a run: nodes download it first, then ranks transfer their state and restart with it.

New code is on trial for its first `TRIAL_STEPS` steps: if it fails within them, every replica that runs it restarts
with the previous code.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from holdfast.control.context import Context, FollowUp
from holdfast.control.elastic import request_exit
from holdfast.control.policy import CRASH_SIGNALS, Failure, FailureKind
from holdfast.control.state import NodePhase, ReplicaPhase, ReplicaState, State, Timer, Update
from holdfast.events import CodeFetched, CodeShipped, UpdateEnded, UpdateOutcome, UpdateRequested
from holdfast.findings import Finding, Severity
from holdfast.job.run_spec import CodeArchive
from holdfast.protocol.orders import FetchCode, FreeState

TRIAL_STEPS = 10
"""Steps for which new code is on trial: if it fails within them, the run rolls back to the previous code."""

STATE_TRANSFER_S, STATE_TRANSFER_STEPS = 60.0, 10
"""Maximum seconds, and maximum steps, that ranks have to finish their step and transfer their state."""

_PROGRAM_FAILURES = (
    *(FailureKind.CRASHED, FailureKind.NOT_STARTED, FailureKind.HUNG, FailureKind.OUT_OF_MEMORY),
    *(FailureKind.NUMBERS_DAMAGED, FailureKind.SPIKED),
)


def code_shipped(ctx: Context, event: CodeShipped) -> None:
    """Ranks run this code."""
    ctx.change(code=_archive(event))


def update_requested(ctx: Context, event: UpdateRequested) -> None:
    """Nodes download the code first. It replaces an update that has not begun."""
    if ctx.state.ending:
        return
    if ctx.state.update is not None and _has_started(ctx.state):
        ctx.report(_under_way_finding(ctx.state.update))
        return
    due = None if event.after_s is None else ctx.at + event.after_s
    update = Update(code=_archive(event) if event.digest else None, due=due)
    ctx.change(update=update)
    ctx.set_timer(Timer.UPDATE, 0, due)
    if update.code is None:
        advance_rollout(ctx)
    else:
        joined = tuple(node.node for node in ctx.state.nodes if node.phase is NodePhase.JOINED)
        ctx.send(FetchCode(digest=update.code.digest), joined)


def _archive(event: CodeShipped | UpdateRequested) -> CodeArchive:
    return CodeArchive(digest=event.digest, bytes=event.bytes, files=event.files, cwd=event.cwd)


def code_fetched(ctx: Context, event: CodeFetched) -> None:
    """A node has the code, or failed to download it: then nothing is stopped for it."""
    update = ctx.state.update
    if update is None or update.code is None or update.code.digest != event.digest or _has_started(ctx.state):
        return
    if event.failure is not None:
        end_update(ctx, UpdateOutcome.ABANDONED, event.failure)
    else:
        _mark_fetched(ctx, update, event.node)
        advance_rollout(ctx)


def _mark_fetched(ctx: Context, update: Update, node: int) -> None:
    ctx.change(update=replace(update, fetched_by=update.fetched_by.with_member(node)))


def fetch_on_join(ctx: Context, node: int) -> None:
    """A joined node without the update's code downloads it, at the latest when its ranks start."""
    update = ctx.state.update
    if update is None or update.code is None or node in update.fetched_by:
        return
    if update.fetched_by:
        _mark_fetched(ctx, update, node)
    else:
        ctx.send(FetchCode(digest=update.code.digest), (node,))


def update_timed_out(ctx: Context, index: int) -> None:
    """No restart came in time: stop the ranks for the update."""
    advance_rollout(ctx)


def advance_rollout(ctx: Context) -> None:
    """Have the ranks exit for the new code, once it is due and all their nodes have it."""
    update = ctx.state.update
    if update is None or update.due is None or ctx.at < update.due:
        return
    running = (replica for replica in ctx.state.replicas if replica.phase is ReplicaPhase.RUNNING)
    leaving = [replica for replica in running if replica.rollout_base_step is None]
    if all(update.is_fetched_by(replica.members) for replica in leaving):
        for replica in leaving:
            if not replica.exit_requested:
                _stop_for_update(ctx, replica)


def _stop_for_update(ctx: Context, replica: ReplicaState) -> None:
    """Ranks that report steps transfer their state; others are stopped."""
    index = replica.replica
    replica = ctx.change_replica(index, exit_requested=True, transfers_state=replica.has_stepped)
    if not replica.has_stepped:
        ctx.report(_state_transfer_skipped(replica))
        ctx.raise_(FollowUp.STOP, index=index)
        return
    longest_s = STATE_TRANSFER_S + STATE_TRANSFER_STEPS * (replica.step_rate.step_s or 0.0)
    ctx.set_timer(Timer.EXIT, index, ctx.at + longest_s)
    request_exit(ctx, replica, replica.members)


def code_of_next_attempt(state: State, replica: ReplicaState, members: tuple[int, ...]) -> dict[str, Any]:
    """The changes to a replica whose next attempt has these members: the code it runs, and since which step."""
    update = state.update
    if update is None:
        return {"code": state.code, "rollout_base_step": None}
    if replica.rollout_base_step is not None:
        return {}
    if not update.is_fetched_by(members):
        return {"code": state.code}
    return {"code": update.code, "rollout_base_step": replica.highest_step}


def make_update_due(ctx: Context, replica: ReplicaState) -> None:
    """If one of several replicas runs an update's code, the others follow: two versions must not average gradients."""
    update = ctx.state.update
    if not ctx.state.has_replicas or update is None or replica.rollout_base_step is None or update.due is not None:
        return
    ctx.change(update=replace(update, due=ctx.at))
    ctx.set_timer(Timer.UPDATE, 0, ctx.at)


def is_rollout_failure(state: State, replica: ReplicaState, failure: Failure) -> bool:
    """Whether a failure is attributed to code on trial, and there is previous code to roll back to."""
    if replica.rollout_base_step is None or state.update is None or state.update.code is None:
        return False
    by_signal = failure.kind is FailureKind.KILLED and failure.code in CRASH_SIGNALS
    return failure.kind in _PROGRAM_FAILURES or by_signal


def settle_update(ctx: Context) -> None:
    """After a step: end the update if the new code has made enough steps; from then on there is no rollback."""
    if ctx.state.update is None or not _is_settled(ctx.state):
        return
    end_update(ctx, UpdateOutcome.APPLIED)
    for node in ctx.state.nodes:
        if node.phase is NodePhase.JOINED and node.replica is not None:
            ctx.send(FreeState(replica=node.replica), (node.node,))


def _is_settled(state: State) -> bool:
    """Whether every running replica has made its trial steps with the new code."""
    at_work = state.running_replicas
    return bool(at_work) and all(
        replica.rollout_base_step is not None and replica.highest_step >= replica.rollout_base_step + TRIAL_STEPS
        for replica in at_work
    )


def end_update(ctx: Context, outcome: UpdateOutcome, finding: Finding | None = None) -> None:
    """End the update, and log how."""
    state, update = ctx.state, ctx.state.update
    assert update is not None, "an update ends once"
    ctx.record(
        UpdateEnded(
            at=ctx.at,
            digest=update.code.digest if update.code else "",
            previous_digest=state.code.digest if state.code else "",
            outcome=outcome,
            step=max(replica.highest_step for replica in state.replicas),
            finding=finding,
        )
    )
    for replica in state.replicas:
        ctx.change_replica(replica.replica, rollout_base_step=None)
    ctx.change(update=None)
    ctx.clear_timers(0, Timer.UPDATE)
    if outcome is UpdateOutcome.APPLIED:
        ctx.change(code=update.code, code_before=state.code, was_updated=update.code is not None)


def was_updated(state: State) -> bool:
    """Whether the code before the last update can run again.

    Not among several replicas, of which all would have to restart, nor if the next attempt gets other code anyway.
    """
    return state.was_updated and state.update is None and not state.has_replicas


def undo_last_update(ctx: Context, finding: Finding) -> None:
    """The next attempt runs the code before the last update, which had ended its trial."""
    state = ctx.state
    ctx.record(
        UpdateEnded(
            at=ctx.at,
            digest=state.code.digest if state.code else "",
            previous_digest=state.code_before.digest if state.code_before else "",
            outcome=UpdateOutcome.ROLLED_BACK,
            step=max(replica.highest_step for replica in state.replicas),
            finding=finding,
        )
    )
    ctx.change(code=state.code_before, code_before=None, was_updated=False)


def _has_started(state: State) -> bool:
    return any(replica.rollout_base_step is not None or replica.transfers_state for replica in state.replicas)


def _under_way_finding(update: Update) -> Finding:
    digest = update.code.digest if update.code else "in place"
    return Finding(
        code="update-in-progress",
        severity=Severity.WARNING,
        what="another update is in progress",
        where="holdfast update",
        evidence=(f"code {digest}",),
        remedy=f"Try again once it has made {TRIAL_STEPS} steps; `holdfast events` says when.",
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
