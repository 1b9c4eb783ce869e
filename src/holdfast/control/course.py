"""Owns the course of an attempt: all its ranks are started, stopped when one fails, judged when quiet, started again.

What happened to a node, a rank or a request is for nodes.py, ranks.py and requests.py; they call what is here.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.control import versions, world
from holdfast.control.blame import first_failure, gave_up
from holdfast.control.commands import Commands, Finish, Look, Record, Start, Stop, TellBack, TellLost
from holdfast.control.drills import pending
from holdfast.control.policy import (
    JUDGE_S,
    STOP_GRACE_S,
    Action,
    Failure,
    FailureKind,
    Verdict,
    judge,
    left,
    replicas_told,
    taken_back,
)
from holdfast.control.slots import asked_again, emptied, expect
from holdfast.control.standby import promote
from holdfast.control.state import Deadline, Ending, NodeState, ReplicaPhase, ReplicaState, State, Transition
from holdfast.errors import ExitCode
from holdfast.events import AttemptStarted, FindingRaised, Outcome, RecoveryDecided, StopDecided, UpdateOutcome
from holdfast.job.patience import Patience
from holdfast.job.spec import Job


def halt(job: Job, state: State, index: int, at: float) -> Transition:
    """Stop every rank of a replica at once; what to do next is decided when all is quiet."""
    replica = state.replicas[index]
    commands: Commands = ()
    if replica.phase is not ReplicaPhase.STOPPING:
        before, state = state, state.with_replica(replace(replica, phase=ReplicaPhase.STOPPING))
        stays = state.attends(state.replicas[index])
        lost = lost_to_others(before, replica) if replica.at_work and not stays else ()
        state, stops = stop_busy(job, state, index, at)
        commands = (*lost, *stops, *_strength(job, before, state, at))
    state, more = proceed(job, state, index, at)
    return state, (*commands, *more)


def lost_to_others(state: State, replica: ReplicaState) -> Commands:
    """Tell the ranks of other replicas that this one's attempt is over: what they wait for will not come."""
    nodes = _others(state, replica.replica)
    return (TellLost(replica=replica.replica, attempt=replica.attempt, nodes=nodes),) if nodes else ()


def parted(state: State, index: int) -> Transition:
    """A replica that had time to leave takes no further step: a rank of it has said so or ended, or its time is up."""
    replica = state.replicas[index]
    if not replica.leaves:
        return state, ()
    return state.with_replica(replace(replica, leaves=False)), lost_to_others(state, replica)


def _others(state: State, index: int) -> tuple[int, ...]:
    """The nodes on which other replicas are at work."""
    attending = (replica for replica in state.replicas if replica.replica != index and state.attends(replica))
    return tuple(node for replica in attending for node in replica.members)


def enough(job: Job, state: State) -> bool:
    """Whether so many replicas are at work that steps are committed."""
    return len(state.at_work) >= job.recovery.min_replicas


def _strength(job: Job, before: State, after: State, at: float) -> Commands:
    """What there is to say when there begin to be too few replicas for a step, or enough again."""
    was, now = enough(job, before), enough(job, after)
    began = any(replica.attempt > 0 for replica in after.replicas) or was
    if was == now or after.ending or not after.several or after.trained or not began:
        return ()
    finding = replicas_told(len(after.at_work), len(after.replicas), job.recovery.min_replicas)
    return (Record(event=FindingRaised(at=at, finding=finding)),)


def stop_busy(job: Job, state: State, index: int, at: float) -> Transition:
    """Have the nodes that may have ranks end them; a deadline that stands already is not put off."""
    busy = tuple(node for node in state.nodes_of(index) if node.busy)
    if not busy:
        return state, ()
    grace_s = _grace_s(job, state, state.replicas[index], at)
    latest = at + grace_s + STOP_GRACE_S
    state = state.with_deadline(
        Deadline.STOP.of(index), min(latest, state.deadlines.get(Deadline.STOP.of(index), latest))
    )
    together = state.several and state.ending is not None
    return state, (stop(state.replicas[index], busy, grace_s, together=together),)


def _grace_s(job: Job, state: State, replica: ReplicaState, at: float) -> float:
    """A recovery kills at once; an ending has its own grace, and ranks that can still save get the job's."""
    if state.ending:
        return state.ending.grace_s
    announced = any(loss.kind is FailureKind.NODE_PREEMPTED for loss in replica.losses)
    return job.recovery.stop_grace_s if announced or _leaves_as_planned(replica, at) else 0.0


def _leaves_as_planned(replica: ReplicaState, at: float) -> bool:
    """Whether a replica's ranks end because they are to start again with more; of those left behind, some complain."""
    failure = first_failure(replica, at)
    return replica.winding_down and (failure.secondary or failure.kind is FailureKind.UNEXPLAINED)


def proceed(job: Job, state: State, index: int, at: float) -> Transition:
    """Go on as far as the nodes allow: judge what is quiet, start what is gathered, finish what is done."""
    replica = state.replicas[index]
    if state.busy & replica.slots:
        return state, ()
    match replica.phase:
        case ReplicaPhase.RUNNING | ReplicaPhase.JUDGING | ReplicaPhase.STOPPING:
            for over in (Deadline.STOP, Deadline.JUDGE, Deadline.LEAVE, Deadline.BEGIN):
                state = state.with_deadline(over.of(index), None)
            state, told = parted(state, index)
            state, commands = _quiet(job, state, state.replicas[index], at)
            return state, (*told, *commands)
        case ReplicaPhase.GATHERING:
            if Deadline.BACK_OFF.of(index) in state.deadlines:
                return state, ()
            members = world.company(job, state, replica)
            return _launch(job, state, replica, members, at) if members else (state, ())
        case ReplicaPhase.DONE:
            return state, ()


def waited(job: Job, state: State, index: int, at: float) -> Transition:
    """The time for missing nodes is up: go on without them, or say what is missing."""
    if state.ending or state.replicas[index].phase is not ReplicaPhase.GATHERING:
        return state, ()
    if finding := world.too_few(job, state, index, at):
        return state, (Record(event=FindingRaised(at=at, finding=finding)),)
    return proceed(job, state, index, at)


def _quiet(job: Job, state: State, replica: ReplicaState, at: float) -> Transition:
    """No rank of this attempt is left: it has succeeded, or is judged."""
    if state.ending or _all_well(job, replica):
        lost = lost_to_others(state, replica) if state.ending and state.attends(replica) else ()
        state, commands = _done(job, state.with_replica(replace(replica, phase=ReplicaPhase.DONE)), at)
        return state, (*lost, *commands)
    if _leaves_as_planned(replica, at):
        growths = replica.growths if replica.hands_over else (*replica.growths, at)
        state = state.with_replica(replace(_cleared(replica), growths=growths))
        return proceed(job, state, replica.replica, at)
    failure = first_failure(replica, at)
    if any(loss.evicted for loss in replica.losses):
        failure = replace(failure, evicted=True)  # whatever else went wrong, the attempt was at its end
    if state.trained:
        record = _record(replica, left(failure), failure, at)
        state, commands = _done(job, state.with_replica(replace(replica, phase=ReplicaPhase.DONE)), at)
        return state, (record, *commands)
    if versions.is_to_blame(state, replica, failure):
        return _roll_back(job, state, replica, failure, at)
    verdict = judge(failure, replica.failures, job.recovery)
    if verdict.action is Action.REPLACE_NODE and state.nodes[failure.node].replica != replica.replica:
        verdict = replace(verdict, action=Action.PROMOTE)
    record = _record(replica, verdict, failure, at)
    state = state.with_replica(replace(_cleared(replica), failures=(*replica.failures, failure)))
    if verdict.action is Action.STOP:
        ending = Ending(outcome=Outcome.FAILED, exit_code=verdict.exit_code, reason=verdict.finding.what)
        state, commands = end(job, state, ending, at, verdict)
    else:
        state, asked = _tried_otherwise(job, state, replica.replica, failure, verdict, at)
        state, commands = proceed(job, state, replica.replica, at)
        commands = (*asked, *commands)
    return state, (record, *commands)


def _roll_back(job: Job, state: State, replica: ReplicaState, failure: Failure, at: float) -> Transition:
    """Code on trial has failed: every replica that runs it starts again with the former, and nobody is blamed else."""
    verdict = taken_back(failure)
    others = [other for other in state.at_work if other.trial is not None and other is not replica]
    state, ended = versions.ended(state, UpdateOutcome.ROLLED_BACK, at, verdict.finding)
    state = state.with_replica(_cleared(state.replicas[replica.replica]))
    commands: Commands = (_record(replica, verdict, failure, at), Record(event=ended))
    for other in others:
        state = state.with_replica(replace(state.replicas[other.replica], winding_down=True, hands_over=True))
        state, more = halt(job, state, other.replica, at)
        commands = (*commands, *more)
    state, more = proceed(job, state, replica.replica, at)
    return state, (*commands, *more)


def _tried_otherwise(job: Job, state: State, replica: int, failure: Failure, verdict: Verdict, at: float) -> Transition:
    """What a replica that fails again and again is given beside another try: time, and at last another node."""
    if verdict.wait_s:
        state = state.with_deadline(Deadline.BACK_OFF.of(replica), at + verdict.wait_s)
    if not verdict.renews or state.nodes[failure.node].replica != replica:
        return state, ()
    fresh = emptied(state.nodes[failure.node], at, verdict.finding.what, haunted=False)
    state = expect(job, state, fresh).with_deadline(Deadline.AWAY.of(fresh.node), None)
    state, promoted, _ = promote(job, state, at)
    return state, (*promoted, *asked_again((state.nodes[fresh.node],), at, fresh.reason))


def _cleared(replica: ReplicaState) -> ReplicaState:
    """A replica whose attempt is over, and which is to start again."""
    gathering = replace(replica, phase=ReplicaPhase.GATHERING, winding_down=False, hands_over=False)
    return replace(gathering, steps=0, well=0, exits=(), heard=0, hangs=(), losses=())


def _all_well(job: Job, replica: ReplicaState) -> bool:
    """Whether every process of the attempt ended by itself with code 0; what befell its node later is no matter."""
    return 0 < replica.well.bit_count() == len(replica.members) * job.processes_per_node


def _launch(job: Job, state: State, replica: ReplicaState, nodes: tuple[NodeState, ...], at: float) -> Transition:
    """Start the next attempt with the head node's fresh port: no address, port or key of a dead one."""
    head, members = nodes[0], tuple(node.node for node in nodes)
    changed = world.change(job, state, replica, members, at)
    replica = replace(
        versions.with_code(state, replica, nodes),
        members=members,
        lost=0,
        phase=ReplicaPhase.RUNNING,
        attempt=replica.attempt + 1,
        started_at=at,
        master_addr=head.address,
        master_port=head.port,
    )
    state = state.with_deadline(Deadline.WAIT.of(replica.replica), None)
    if job.recovery.step_deadline_s is not None and state.first_step_s:
        allowed_s = Patience(deadline_s=job.recovery.step_deadline_s).begin_s(state.first_step_s)
        state = state.with_deadline(Deadline.BEGIN.of(replica.replica), at + allowed_s)
    if len(members) == replica.slots.bit_count():
        state = state.with_deadline(Deadline.JOIN.of(replica.replica), None)
    state = state.with_nodes(node.but(busy=True) for node in nodes)
    started = AttemptStarted(
        at=at,
        replica=replica.replica,
        attempt=replica.attempt,
        world_size=len(nodes) * job.local_world_size,
        master_addr=head.address,
        master_port=head.port,
        nodes=members,
        code=replica.code.digest if replica.code else "",
    )
    before, state = state, versions.shared(state.with_replica(replica), replica, at)
    back = TellBack(replica=replica.replica, attempt=replica.attempt, nodes=_others(state, replica.replica))
    told = ((back,) if back.nodes and replica.attempt > 0 else ()) + _strength(job, before, state, at)
    drills = tuple(drill for node in members for drill in pending(job, state, node)) if state.drills else ()
    said = (Record(event=changed), Record(event=started)) if changed else (Record(event=started),)
    return state, (*said, start(replica, nodes), *told, *drills)


def end(job: Job, state: State, ending: Ending, at: float, verdict: Verdict | None = None) -> Transition:
    """Bring the whole run to its end: every replica stops, in its own time."""
    decided = StopDecided(
        at=at,
        outcome=ending.outcome,
        reason=ending.reason,
        exit_code=ending.exit_code,
        finding=verdict.finding if verdict else None,
    )
    commands: Commands = () if state.ending else (Record(event=decided),)
    state = replace(state, ending=ending)
    for replica in state.replicas:
        match replica.phase:
            case ReplicaPhase.RUNNING | ReplicaPhase.JUDGING:
                state, more = halt(job, state, replica.replica, at)
            case ReplicaPhase.STOPPING:
                state, more = stop_busy(job, state, replica.replica, at)
            case ReplicaPhase.GATHERING:
                state, more = _done(job, state.with_replica(replace(replica, phase=ReplicaPhase.DONE)), at)
            case ReplicaPhase.DONE:
                continue
        commands = (*commands, *more)
    return state, commands


def _done(job: Job, state: State, at: float) -> Transition:
    """A replica has ended; when it was the last, so has the run, and when it was the first to finish, the training."""
    commands: Commands = ()
    for replica in state.replicas if state.trained else ():
        late = replica.at_work and replica.step > 0 and not replica.stepped
        if replica.phase is ReplicaPhase.GATHERING and replica.attempt >= 0:
            state = state.with_replica(replace(replica, phase=ReplicaPhase.DONE))
        elif late:
            state, more = halt(job, state, replica.replica, at)
            commands = (*commands, *more)
    if not state.done:
        return state, commands
    if state.ending:
        return state, (Finish(),)
    ending = Ending(outcome=Outcome.SUCCEEDED, exit_code=ExitCode.OK, reason="every rank finished")
    decided = StopDecided(at=at, outcome=ending.outcome, reason=ending.reason, exit_code=ending.exit_code)
    return replace(state, ending=ending), (Record(event=decided), Finish())


def start(replica: ReplicaState, nodes: tuple[NodeState, ...]) -> Start:
    """Have these nodes start their ranks of the attempt in hand."""
    return Start(
        replica=replica.replica,
        attempt=replica.attempt,
        nodes=tuple(node.node for node in nodes),
        master_addr=replica.master_addr,
        master_port=replica.master_port,
        code=replica.code,
    )


def stop(replica: ReplicaState, nodes: tuple[NodeState, ...], grace_s: float, *, together: bool = False) -> Stop:
    """Have these nodes end their ranks of the attempt in hand."""
    numbers = tuple(node.node for node in nodes)
    return Stop(replica=replica.replica, attempt=replica.attempt, nodes=numbers, grace_s=grace_s, together=together)


def judge_soon(job: Job, state: State, index: int, at: float) -> Transition:
    """Some wait in vain, and the one to blame differs only in its stack: stop when every rank's word of it is there.

    Of several replicas another may be to blame, so all that may say so get their time.

    Some have not come so far as to speak of their steps, so that no deadline watches them: those are asked for.
    """
    replica = replace(state.replicas[index], phase=ReplicaPhase.JUDGING)
    state = state.with_replica(replica)
    all_heard = (replica.heard | replica.well).bit_count() >= len(replica.members) * job.local_world_size
    if all_heard and not state.several:
        return halt(job, state, index, at)
    if Deadline.JUDGE.of(index) in state.deadlines:
        return state, ()
    busy = tuple(node for node in state.nodes_of(index) if node.busy)
    return state.with_deadline(Deadline.JUDGE.of(index), at + JUDGE_S), (look(replica, busy),)


def look(replica: ReplicaState, nodes: tuple[NodeState, ...]) -> Look:
    """Have these nodes report ranks that no deadline watches: those that have yet to speak.

    Where a rank gave up waiting there may be no deadline for steps, or a longer one: then all are asked for.
    """
    numbers = tuple(node.node for node in nodes)
    everyone = any(map(gave_up, replica.exits))
    return Look(replica=replica.replica, attempt=replica.attempt, nodes=numbers, everyone=everyone)


def _record(replica: ReplicaState, verdict: Verdict, failure: Failure, at: float) -> Record:
    decided = RecoveryDecided(
        at=at,
        replica=replica.replica,
        attempt=replica.attempt,
        action=verdict.action.value,
        failed_at=failure.at,
        finding=verdict.finding,
        first_rank=failure.rank,
        log_rank=failure.log_rank,
        repeats_s=verdict.repeats_s,
    )
    return Record(event=decided)
