"""The lifecycle of an attempt: starts all its ranks, stops them when one fails, judges the failure and restarts.

Events of nodes, ranks and requests are in node_handlers.py, rank_handlers.py and request_handlers.py, which call this
module.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control import code_versions, elastic
from holdfast.control.commands import (
    AnnounceReplicaDown,
    AnnounceReplicaStarting,
    Commands,
    FinishRun,
    RecordEvent,
    ReportSilentRanks,
    StartAttempt,
    StopRanks,
)
from holdfast.control.fault_requests import pending_for_node
from holdfast.control.node_slots import arm_join_timeout, next_generation, request_again
from holdfast.control.policy import (
    HANG_VERDICT_S,
    STOP_GRACE_S,
    Action,
    Failure,
    FailureKind,
    Verdict,
    decide,
    ignored,
    quorum_finding,
    rolled_back,
)
from holdfast.control.root_cause import first_failure, timed_out_waiting
from holdfast.control.standby_promotion import promote_standbys
from holdfast.control.state import Ending, NodeState, ReplicaPhase, ReplicaState, State, Timer, Transition
from holdfast.errors import ExitCode
from holdfast.events import AttemptStarted, FindingRaised, Outcome, RecoveryDecided, ShutdownDecided, UpdateOutcome
from holdfast.job.spec import Job
from holdfast.job.step_timeouts import StepTimeouts


def stop_replica(job: Job, state: State, index: int, at: float) -> Transition:
    """Stop every rank of a replica immediately; the next action is decided when all have stopped."""
    replica = state.replicas[index]
    commands: Commands = ()
    if replica.phase is not ReplicaPhase.STOPPING:
        before, state = state, state.with_replica(replace(replica, phase=ReplicaPhase.STOPPING))
        stays = state.may_step(state.replicas[index])
        lost = announce_replica_down(before, replica) if replica.is_running and not stays else ()
        state, stops = stop_running_nodes(job, state, index, at)
        commands = (*lost, *stops, *_quorum_findings(job, before, state, at))
    state, more = advance(job, state, index, at)
    return state, (*commands, *more)


def announce_replica_down(state: State, replica: ReplicaState) -> Commands:
    """Notify the ranks of other replicas that this one's attempt is over, so that they stop waiting for it."""
    nodes = _nodes_of_other_replicas(state, replica.replica)
    return (AnnounceReplicaDown(replica=replica.replica, attempt=replica.attempt, nodes=nodes),) if nodes else ()


def mark_departed(state: State, index: int) -> Transition:
    """A draining replica takes no further step: one of its ranks reported so or ended, or its time is up."""
    replica = state.replicas[index]
    if not replica.draining:
        return state, ()
    return state.with_replica(replace(replica, draining=False)), announce_replica_down(state, replica)


def _nodes_of_other_replicas(state: State, index: int) -> tuple[int, ...]:
    """The nodes on which other replicas run."""
    stepping = (replica for replica in state.replicas if replica.replica != index and state.may_step(replica))
    return tuple(node for replica in stepping for node in replica.members)


def has_quorum(job: Job, state: State) -> bool:
    """Whether enough replicas run for steps to be committed."""
    return len(state.running_replicas) >= job.recovery.min_replicas


def _quorum_findings(job: Job, before: State, after: State, at: float) -> Commands:
    """Findings for when the quorum for a step is lost or restored."""
    was, now = has_quorum(job, before), has_quorum(job, after)
    began = any(replica.attempt > 0 for replica in after.replicas) or was
    if was == now or after.ending or not after.has_replicas or after.training_complete or not began:
        return ()
    finding = quorum_finding(len(after.running_replicas), len(after.replicas), job.recovery.min_replicas)
    return (RecordEvent(event=FindingRaised(at=at, finding=finding)),)


def stop_running_nodes(job: Job, state: State, index: int, at: float) -> Transition:
    """Have nodes that may have ranks stop them; an existing deadline is not postponed."""
    busy = tuple(node for node in state.nodes_of(index) if node.has_processes)
    if not busy:
        return state, ()
    grace_s = _stop_grace_s(job, state, state.replicas[index], at)
    latest = at + grace_s + STOP_GRACE_S
    state = state.with_timer(Timer.STOP.key(index), min(latest, state.timers.get(Timer.STOP.key(index), latest)))
    together = state.has_replicas and state.ending is not None
    return state, (stop_command(state.replicas[index], busy, grace_s, together=together),)


def _stop_grace_s(job: Job, state: State, replica: ReplicaState, at: float) -> float:
    """A recovery kills immediately; an ending has its own grace period; ranks that can still save get the job's."""
    if state.ending:
        return state.ending.grace_s
    announced = any(loss.kind is FailureKind.NODE_PREEMPTED for loss in replica.node_failures)
    return job.recovery.stop_grace_s if announced or _exited_as_planned(replica, at) else 0.0


def _exited_as_planned(replica: ReplicaState, at: float) -> bool:
    """Whether a replica's ranks exit to restart with more nodes; those left behind may report peer errors."""
    failure = first_failure(replica, at)
    return replica.exit_requested and (failure.is_peer_symptom or failure.kind is FailureKind.CAUSE_UNKNOWN)


def advance(job: Job, state: State, index: int, at: float) -> Transition:
    """Advance as far as the nodes allow: judge stopped ranks, start gathered nodes, finish completed replicas."""
    replica = state.replicas[index]
    if state.nodes_with_processes & replica.slots:
        return state, ()
    match replica.phase:
        case ReplicaPhase.RUNNING | ReplicaPhase.HANG_SUSPECTED | ReplicaPhase.STOPPING:
            for over in (Timer.STOP, Timer.HANG_VERDICT, Timer.EXIT, Timer.FIRST_STEP):
                state = state.with_timer(over.key(index), None)
            state, announcements = mark_departed(state, index)
            state, commands = _on_all_stopped(job, state, state.replicas[index], at)
            return state, (*announcements, *commands)
        case ReplicaPhase.GATHERING:
            if Timer.BACK_OFF.key(index) in state.timers:
                return state, ()
            members = elastic.select_members(job, state, replica)
            return _start_attempt(job, state, replica, members, at) if members else (state, ())
        case ReplicaPhase.DONE:
            return state, ()


def on_min_nodes_timeout(job: Job, state: State, index: int, at: float) -> Transition:
    """The time for missing nodes is up: start without them, or report what is missing."""
    if state.ending or state.replicas[index].phase is not ReplicaPhase.GATHERING:
        return state, ()
    if finding := elastic.too_few_nodes_finding(job, state, index, at):
        return state, (RecordEvent(event=FindingRaised(at=at, finding=finding)),)
    return advance(job, state, index, at)


def _on_all_stopped(job: Job, state: State, replica: ReplicaState, at: float) -> Transition:
    """No rank of this attempt is left: it has succeeded, or is judged."""
    if state.ending or _all_succeeded(job, replica):
        lost = announce_replica_down(state, replica) if state.ending and state.may_step(replica) else ()
        state, commands = _on_replica_done(job, state.with_replica(replace(replica, phase=ReplicaPhase.DONE)), at)
        return state, (*lost, *commands)
    if _exited_as_planned(replica, at):
        scale_ups = replica.scale_ups if replica.transfers_state else (*replica.scale_ups, at)
        state = state.with_replica(replace(_ready_for_next_attempt(replica), scale_ups=scale_ups))
        return advance(job, state, replica.replica, at)
    failure = first_failure(replica, at)
    if any(loss.evicted for loss in replica.node_failures):
        failure = replace(failure, evicted=True)  # whatever else failed, the eviction ended the attempt
    if state.training_complete:
        record = _recovery_record(replica, ignored(failure), failure, at)
        state, commands = _on_replica_done(job, state.with_replica(replace(replica, phase=ReplicaPhase.DONE)), at)
        return state, (record, *commands)
    if code_versions.is_rollout_failure(state, replica, failure):
        return _roll_back(job, state, replica, failure, at)
    verdict = decide(failure, replica.failures, job.recovery)
    if verdict.action is Action.REPLACE_NODE and state.nodes[failure.node].replica != replica.replica:
        verdict = replace(verdict, action=Action.PROMOTE)
    record = _recovery_record(replica, verdict, failure, at)
    state = state.with_replica(replace(_ready_for_next_attempt(replica), failures=(*replica.failures, failure)))
    if verdict.action is Action.STOP:
        ending = Ending(outcome=Outcome.FAILED, exit_code=verdict.exit_code, reason=verdict.finding.what)
        state, commands = end_run(job, state, ending, at, verdict)
    else:
        state, asked = _back_off_or_replace(job, state, replica.replica, failure, verdict, at)
        state, commands = advance(job, state, replica.replica, at)
        commands = (*asked, *commands)
    return state, (record, *commands)


def _roll_back(job: Job, state: State, replica: ReplicaState, failure: Failure, at: float) -> Transition:
    """Code on trial has failed: every replica that runs it restarts with the previous code, without further blame."""
    verdict = rolled_back(failure)
    others = [other for other in state.running_replicas if other.rollout_base_step is not None and other is not replica]
    state, ended = code_versions.update_ended(state, UpdateOutcome.ROLLED_BACK, at, verdict.finding)
    state = state.with_replica(_ready_for_next_attempt(state.replicas[replica.replica]))
    commands: Commands = (_recovery_record(replica, verdict, failure, at), RecordEvent(event=ended))
    for other in others:
        state = state.with_replica(replace(state.replicas[other.replica], exit_requested=True, transfers_state=True))
        state, more = stop_replica(job, state, other.replica, at)
        commands = (*commands, *more)
    state, more = advance(job, state, replica.replica, at)
    return state, (*commands, *more)


def _back_off_or_replace(
    job: Job, state: State, replica: int, failure: Failure, verdict: Verdict, at: float
) -> Transition:
    """Give a replica that fails repeatedly a pause and finally another node, in addition to a restart."""
    if verdict.wait_s:
        state = state.with_timer(Timer.BACK_OFF.key(replica), at + verdict.wait_s)
    if not verdict.replace_node or state.nodes[failure.node].replica != replica:
        return state, ()
    fresh = next_generation(state.nodes[failure.node], at, verdict.finding.what, maybe_alive=False)
    state = arm_join_timeout(job, state, fresh).with_timer(Timer.RECONNECT.key(fresh.node), None)
    state, promoted, _ = promote_standbys(job, state, at)
    return state, (*promoted, *request_again((state.nodes[fresh.node],), at, fresh.reason))


def _ready_for_next_attempt(replica: ReplicaState) -> ReplicaState:
    """A replica whose attempt is over and which is to restart."""
    gathering = replace(replica, phase=ReplicaPhase.GATHERING, exit_requested=False, transfers_state=False)
    return replace(gathering, attempt_steps=0, succeeded=0, rank_failures=(), reported=0, hangs=(), node_failures=())


def _all_succeeded(job: Job, replica: ReplicaState) -> bool:
    """Whether every process of the attempt exited with code 0; later events of its node do not matter."""
    return 0 < replica.succeeded.bit_count() == len(replica.members) * job.processes_per_node


def _start_attempt(
    job: Job, state: State, replica: ReplicaState, nodes: tuple[NodeState, ...], at: float
) -> Transition:
    """Start the next attempt with the head node's newly reserved port; addresses, ports and keys are never reused."""
    head, members = nodes[0], tuple(node.node for node in nodes)
    changed = elastic.world_size_change(job, state, replica, members, at)
    replica = replace(
        code_versions.with_code(state, replica, nodes),
        members=members,
        lost_slots=0,
        phase=ReplicaPhase.RUNNING,
        attempt=replica.attempt + 1,
        started_at=at,
        master_addr=head.address,
        master_port=head.port,
    )
    state = state.with_timer(Timer.MIN_NODES.key(replica.replica), None)
    if job.recovery.step_timeout_s is not None and state.longest_first_step_s:
        allowed_s = StepTimeouts(step_timeout_s=job.recovery.step_timeout_s).first_step_s(state.longest_first_step_s)
        state = state.with_timer(Timer.FIRST_STEP.key(replica.replica), at + allowed_s)
    if len(members) == replica.slots.bit_count():
        state = state.with_timer(Timer.JOIN.key(replica.replica), None)
    state = state.with_nodes(node.with_changes(has_processes=True) for node in nodes)
    started = AttemptStarted(
        at=at,
        replica=replica.replica,
        attempt=replica.attempt,
        world_size=len(nodes) * job.local_world_size,
        master_addr=head.address,
        master_port=head.port,
        nodes=members,
        code_digest=replica.code.digest if replica.code else "",
    )
    before, state = state, code_versions.with_update_due(state.with_replica(replica), replica, at)
    back = AnnounceReplicaStarting(
        replica=replica.replica, attempt=replica.attempt, nodes=_nodes_of_other_replicas(state, replica.replica)
    )
    announcements = ((back,) if back.nodes and replica.attempt > 0 else ()) + _quorum_findings(job, before, state, at)
    faults = (
        tuple(drill for node in members for drill in pending_for_node(job, state, node)) if state.pending_faults else ()
    )
    said = (RecordEvent(event=changed), RecordEvent(event=started)) if changed else (RecordEvent(event=started),)
    return state, (*said, start_command(replica, nodes), *announcements, *faults)


def end_run(job: Job, state: State, ending: Ending, at: float, verdict: Verdict | None = None) -> Transition:
    """End the whole run: every replica stops, within its grace period."""
    decided = ShutdownDecided(
        at=at,
        outcome=ending.outcome,
        reason=ending.reason,
        exit_code=ending.exit_code,
        finding=verdict.finding if verdict else None,
    )
    commands: Commands = () if state.ending else (RecordEvent(event=decided),)
    state = replace(state, ending=ending)
    for replica in state.replicas:
        match replica.phase:
            case ReplicaPhase.RUNNING | ReplicaPhase.HANG_SUSPECTED:
                state, more = stop_replica(job, state, replica.replica, at)
            case ReplicaPhase.STOPPING:
                state, more = stop_running_nodes(job, state, replica.replica, at)
            case ReplicaPhase.GATHERING:
                state, more = _on_replica_done(job, state.with_replica(replace(replica, phase=ReplicaPhase.DONE)), at)
            case ReplicaPhase.DONE:
                continue
        commands = (*commands, *more)
    return state, commands


def _on_replica_done(job: Job, state: State, at: float) -> Transition:
    """A replica has ended; if it was the last, so has the run; if it was the first to finish, so has the training."""
    commands: Commands = ()
    for replica in state.replicas if state.training_complete else ():
        late = replica.is_running and replica.highest_step > 0 and not replica.has_stepped
        if replica.phase is ReplicaPhase.GATHERING and replica.attempt >= 0:
            state = state.with_replica(replace(replica, phase=ReplicaPhase.DONE))
        elif late:
            state, more = stop_replica(job, state, replica.replica, at)
            commands = (*commands, *more)
    if not state.done:
        return state, commands
    if state.ending:
        return state, (FinishRun(),)
    ending = Ending(outcome=Outcome.SUCCEEDED, exit_code=ExitCode.OK, reason="every rank finished")
    decided = ShutdownDecided(at=at, outcome=ending.outcome, reason=ending.reason, exit_code=ending.exit_code)
    return replace(state, ending=ending), (RecordEvent(event=decided), FinishRun())


def start_command(replica: ReplicaState, nodes: tuple[NodeState, ...]) -> StartAttempt:
    """Have these nodes start their ranks of the current attempt."""
    return StartAttempt(
        replica=replica.replica,
        attempt=replica.attempt,
        nodes=tuple(node.node for node in nodes),
        master_addr=replica.master_addr,
        master_port=replica.master_port,
        code=replica.code,
    )


def stop_command(
    replica: ReplicaState, nodes: tuple[NodeState, ...], grace_s: float, *, together: bool = False
) -> StopRanks:
    """Have these nodes stop their ranks of the current attempt."""
    numbers = tuple(node.node for node in nodes)
    return StopRanks(
        replica=replica.replica, attempt=replica.attempt, nodes=numbers, grace_s=grace_s, all_replicas=together
    )


def arm_hang_verdict(job: Job, state: State, index: int, at: float) -> Transition:
    """Ranks wait, and only the culprit's stack differs: stop when every rank has reported.

    Among several replicas the culprit may be in another, so all ranks that may report get their time. Ranks that have
    not reported a step yet have no step timeout: their reports are requested.
    """
    replica = replace(state.replicas[index], phase=ReplicaPhase.HANG_SUSPECTED)
    state = state.with_replica(replica)
    all_heard = (replica.reported | replica.succeeded).bit_count() >= len(replica.members) * job.local_world_size
    if all_heard and not state.has_replicas:
        return stop_replica(job, state, index, at)
    if Timer.HANG_VERDICT.key(index) in state.timers:
        return state, ()
    busy = tuple(node for node in state.nodes_of(index) if node.has_processes)
    return state.with_timer(Timer.HANG_VERDICT.key(index), at + HANG_VERDICT_S), (report_silent_command(replica, busy),)


def report_silent_command(replica: ReplicaState, nodes: tuple[NodeState, ...]) -> ReportSilentRanks:
    """Have these nodes report ranks without a step timeout: those that have sent no hello yet.

    If a rank gave up waiting there may be no step timeout, or a longer one: then all ranks report.
    """
    numbers = tuple(node.node for node in nodes)
    everyone = any(map(timed_out_waiting, replica.rank_failures))
    return ReportSilentRanks(replica=replica.replica, attempt=replica.attempt, nodes=numbers, all_ranks=everyone)


def _recovery_record(replica: ReplicaState, verdict: Verdict, failure: Failure, at: float) -> RecordEvent:
    decided = RecoveryDecided(
        at=at,
        replica=replica.replica,
        attempt=replica.attempt,
        action=verdict.action.value,
        failed_at=failure.at,
        finding=verdict.finding,
        first_failed_rank=failure.rank,
        log_owner_rank=failure.log_owner_rank,
        recomputed_s=verdict.recomputed_s,
    )
    return RecordEvent(event=decided)
