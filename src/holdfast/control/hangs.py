"""Handles ranks that complete no step: collects their reports, and of several replicas finds the culprit.

In a hang all ranks wait, and only the culprit's flight recorder and stack differ. A single replica restarts whole, so
it is stopped when all ranks have reported or their time is over; `first_failure` in root_cause.py then names the
culprit. Of several replicas only the culprit is stopped, immediately if its report
is conclusive: a rank is stopped by a signal, or is anywhere but in a wait for its peers, or all its ranks have reported
and the flight recorders name one, or all wait, none of them for another replica. The replicas that wait for it continue
when it is gone.

With `recovery.step_timeout_s: auto` and one replica, most reports count only if every rank reports: a rank that is at
work, in an evaluation or a checkpoint, reports nothing, and the others wait for it.

A report begins in agent/rank_reports.py, where a step or another activity renews the deadline of
job/step_timeouts.py, and in agent/hang_detector.py, which finds it passed. `Timer.FIRST_STEP` asks for reports too, and
a rank that exits because it waited too long is suspected by rank_handlers.py. After the stop lifecycle.py asks
root_cause.py and policy.py.
"""

from __future__ import annotations

import math

from holdfast.control.context import Context, FollowUp
from holdfast.control.node_set import NO_RANKS, RankSet, ranks_of
from holdfast.control.notices import has_quorum
from holdfast.control.policy import HANG_VERDICT_S
from holdfast.control.rollout import advance_rollout
from holdfast.control.root_cause import (
    HangSuspicion,
    by_hang_suspicion,
    hang_culprits,
    hang_suspicion,
    is_not_waiting,
    is_standstill,
    timed_out_waiting,
    waits_for_other_replicas,
    waits_inside_replica,
)
from holdfast.control.state import ReplicaPhase, ReplicaState, State, Timer
from holdfast.events import RankHung, RanksHung, StepCommitted
from holdfast.job.spec import Job
from holdfast.job.step_timeouts import AUTO_MAX_S, EARLY_MARGIN_S, EARLY_STEPS, StepTimeouts
from holdfast.protocol.orders import ReportSilentRanks


def rank_hung(ctx: Context, event: RankHung) -> None:
    """Wait for the reports of the other ranks, unless this one is conclusive."""
    replica = ctx.state.replicas[event.replica]
    if ctx.state.has_replicas and not has_quorum(ctx.job, ctx.state):
        return  # it waits for lost replicas
    if event.unless_others_work and replica.phase is ReplicaPhase.RUNNING:
        _add_silent(ctx, event, RankSet().with_member(event.rank))
        return
    _count_silent(ctx, event.replica)
    replica = ctx.state.replicas[event.replica]
    ctx.change_replica(event.replica, reported=replica.reported.with_member(event.rank), hangs=(*replica.hangs, event))
    if ctx.state.has_replicas and _is_conclusive(ctx.job, ctx.state, event):
        _stop_suspect(ctx, event.replica)
    else:
        await_reports(ctx, event.replica)


def ranks_silent(ctx: Context, event: RanksHung) -> None:
    """Many ranks report that they do nothing."""
    if event.unless_others_work:
        _add_silent(ctx, event, ranks_of(event.ranks))


def _add_silent(ctx: Context, event: RankHung | RanksHung, ranks: RankSet) -> None:
    """Add reports that count only together; stop the replica if all ranks are silent and wait for one another."""
    replica = ctx.state.replicas[event.replica]
    if not replica.silent_ranks or event.last_step_at > replica.silent_since:  # a rank has made a step since
        replica = ctx.change_replica(event.replica, silent=(), silent_ranks=NO_RANKS, silent_since=event.at)
    own = (event,) if isinstance(event, RankHung) else ()
    others = tuple(one for one in replica.silent if one.rank not in ranks)
    replica = ctx.change_replica(event.replica, silent=(*others, *own), silent_ranks=replica.silent_ranks | ranks)
    everyone = len(replica.silent_ranks | replica.succeeded) >= len(replica.members) * ctx.job.local_world_size
    if everyone and is_standstill(replica.silent):
        _count_silent(ctx, event.replica)
        await_reports(ctx, event.replica)
    elif own and own[0].waited_s >= AUTO_MAX_S and own[0].last_step >= 0:
        request_reports(ctx, event.replica)


def _count_silent(ctx: Context, index: int) -> None:
    """Count the reports of silent ranks as reports of hung ranks from now on."""
    replica = ctx.state.replicas[index]
    ctx.change_replica(
        index,
        reported=replica.reported | replica.silent_ranks,
        hangs=(*replica.hangs, *replica.silent),
        silent=(),
        silent_ranks=NO_RANKS,
    )


def await_reports(ctx: Context, index: int) -> None:
    """Suspect a hang, and stop the replica when every rank has reported: only the culprit's stack differs.

    Among several replicas the culprit may be in another, so all ranks that may report get their time. Ranks that have
    not reported a step yet have no step timeout: their reports are requested.
    """
    replica = ctx.change_replica(index, phase=ReplicaPhase.HANG_SUSPECTED)
    due, continues_until = ctx.timer(Timer.HANG_VERDICT, index), _continues_until(ctx, replica)
    if _all_heard(ctx.job, replica) and not ctx.state.has_replicas and continues_until is None:
        ctx.raise_(FollowUp.STOP, index=index)
        return
    if due is None:
        request_reports(ctx, index)
    ctx.set_timer(Timer.HANG_VERDICT, index, max(due or ctx.at + HANG_VERDICT_S, continues_until or 0.0))


def _continues_until(ctx: Context, replica: ReplicaState) -> float | None:
    """The time at which a step is due, if a node has reconnected since the first report: its ranks waited for that.

    A node that connects again and again does not delay the verdict for longer than one that is lost.
    """
    reported_at = min((hung.at for hung in replica.hangs), default=math.inf)
    reconnected_at = max(ctx.state.nodes[node].connected_at for node in replica.members)
    if reconnected_at <= reported_at:
        return None
    last_at = reported_at + ctx.job.recovery.node_grace_s
    return min(reconnected_at, last_at) + max(HANG_VERDICT_S, 2 * (replica.step_rate.step_s or 0.0))


def await_reports_again(ctx: Context, index: int) -> None:
    """The other ranks get as much time again to report."""
    ctx.set_timer(Timer.HANG_VERDICT, index, ctx.at + HANG_VERDICT_S)


def request_reports(ctx: Context, index: int) -> None:
    """Request reports from ranks that have yet to open their Session, since no step timeout watches them."""
    send_report_request(ctx, ctx.state.replicas[index], ctx.state.busy_nodes_of(index))


def send_report_request(ctx: Context, replica: ReplicaState, nodes: tuple[int, ...]) -> None:
    """Have these nodes report ranks without a step timeout: those that have sent no hello yet.

    If a rank gave up waiting there may be no step timeout, or a longer one: then all ranks report.
    """
    everyone = any(map(timed_out_waiting, replica.rank_failures))
    ctx.send(ReportSilentRanks(replica=replica.replica, attempt=replica.attempt, all_ranks=everyone), nodes)


def hang_verdict_due(ctx: Context, index: int) -> None:
    """No more reports will arrive: stop the suspect; among several replicas it may be another, or one that is gone."""
    state = ctx.state
    if not state.has_replicas:
        ctx.raise_(FollowUp.STOP, index=index)
        return
    suspected = [replica for replica in state.replicas if replica.phase is ReplicaPhase.HANG_SUSPECTED]
    suspect = min(suspected, key=_suspicion)
    recovering = any(_is_recovering(replica) for replica in state.replicas if replica.replica != index)
    if recovering or _waits_for_compiling_replica(ctx.job, state, suspect):
        _clear_suspicion(ctx, index)
    else:
        _stop_suspect(ctx, suspect.replica)


def on_progress(ctx: Context, event: StepCommitted) -> None:
    """A replica that has completed a step since the report does not hang; one of which a rank gave up cannot."""
    replica = ctx.state.replicas[event.replica]
    reported_at = max((hung.at for hung in replica.hangs), default=math.inf)
    suspected = replica.phase is ReplicaPhase.HANG_SUSPECTED and not replica.rank_failures
    if suspected and event.ended > reported_at:
        _clear_suspicion(ctx, event.replica)


def _stop_suspect(ctx: Context, index: int) -> None:
    """Stop a replica; other suspected ones have been waiting for it."""
    for replica in ctx.state.replicas:
        if replica.phase is ReplicaPhase.HANG_SUSPECTED and replica.replica != index:
            _clear_suspicion(ctx, replica.replica)
    ctx.raise_(FollowUp.STOP, index=index)


def _clear_suspicion(ctx: Context, index: int) -> None:
    ctx.change_replica(index, phase=ReplicaPhase.RUNNING, reported=NO_RANKS, hangs=())
    ctx.clear_timers(index, Timer.HANG_VERDICT)
    advance_rollout(ctx)  # which left it out while it was suspected
    ctx.raise_(FollowUp.SCALE_UP, index=index)  # likewise


def _all_heard(job: Job, replica: ReplicaState) -> bool:
    """Whether every rank has reported, or has exited successfully."""
    return len(replica.reported | replica.succeeded) >= len(replica.members) * job.local_world_size


def _is_conclusive(job: Job, state: State, hung: RankHung) -> bool:
    """Whether the reports show that a replica holds up the others; a stopped process is better evidence than a stack.

    While another replica recovers, which keeps the cores busy, any replica may be slow for a while.
    """
    replica = state.replicas[hung.replica]
    excused = any(_is_recovering(other) for other in state.replicas if other is not replica)
    if excused and hung.waited_s < EARLY_MARGIN_S:
        return hung.process_state == "T"
    if hung.process_state == "T" or is_not_waiting(hung):
        return True
    if not _all_heard(job, replica):
        return False
    # Only a stack shows that a rank does not wait for other replicas.
    culprits = hang_culprits(replica.hangs)
    named = any(each.rank in culprits and each.top_frame for each in replica.hangs)
    return named or all(map(waits_inside_replica, replica.hangs))


def _is_recovering(replica: ReplicaState) -> bool:
    """Whether others may rightly wait for a replica: it is recovering, and has yet to commit its first step."""
    coming = replica.phase in (ReplicaPhase.STOPPING, ReplicaPhase.GATHERING)
    return coming or (replica.phase is ReplicaPhase.RUNNING and not replica.has_stepped)


def _waits_for_compiling_replica(job: Job, state: State, suspect: ReplicaState) -> bool:
    """Whether it waits for a replica that may take longer in its early steps, which that replica's agent reports.

    No step takes that much longer than the longest.
    """
    longest_s = 2 * StepTimeouts(step_timeout_s=job.recovery.step_timeout_s or "auto").non_step_s
    early = any(other.phase is ReplicaPhase.RUNNING and other.attempt_steps <= EARLY_STEPS for other in state.replicas)
    return early and all(waits_for_other_replicas(hung) and hung.waited_s < longest_s for hung in suspect.hangs)


def _suspicion(replica: ReplicaState) -> tuple[bool, bool, HangSuspicion]:
    """Smallest for the replica most likely to hold up the others, by its likeliest rank."""
    culprits = hang_culprits(replica.hangs)
    first = by_hang_suspicion(replica.hangs, culprits)[0]
    return first.process_state != "T", first.rank not in culprits, hang_suspicion(first)
