"""Owns every decision of a run: a pure function from (state, event) to (state, commands), over a table by event type.

The log holds the events this machine was fed, so folding the log through it gives back the state; commands are then
dropped, except those that `ControllerStarted` and `AgentJoined` ask for again. Clock, randomness and processes come in
as events. Policy (policy.py) says what a failure deserves; blame (blame.py) says which failure came first.

It is one file, longer than others, because a transition is only right beside those that come before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.control.blame import first_failure, is_failure
from holdfast.control.commands import Checkpoint, Command, Finish, Inject, Record, ReplaceNode, Start, Stop, SubmitNodes
from holdfast.control.policy import (
    AWAY_GRACE_S,
    JUDGE_S,
    STOP_GRACE_S,
    Action,
    Failure,
    FailureKind,
    Verdict,
    judge,
)
from holdfast.control.state import Ending, NodePhase, NodeState, ReplicaPhase, ReplicaState, State
from holdfast.errors import ExitCode
from holdfast.events import (
    AgentJoined,
    AgentLeft,
    AnyEvent,
    AttemptStarted,
    CancelRequested,
    CheckpointRequested,
    ControllerStarted,
    DeadlinePassed,
    DrillDone,
    DrillRequested,
    DrillTarget,
    NodeGone,
    NodeRequested,
    Outcome,
    RankExited,
    RankHung,
    RanksStopped,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    StepCommitted,
    StopDecided,
)
from holdfast.job.spec import Job, Launch

Commands = tuple[Command, ...]
Transition = tuple[State, Commands]


@dataclass(frozen=True)
class Machine:
    """The machine for one job; holds no state of its own."""

    job: Job
    replicas: int = 1

    def step(self, state: State, event: AnyEvent) -> Transition:
        """Take one event; events that carry no decision leave the state as it is."""
        if state.finished:
            return state, ()
        handler = _TABLE.get(type(event))
        return handler(self, state, event) if handler else (state, ())

    def replay(self, events: Iterable[AnyEvent]) -> State:
        """The state after these events, with nothing done about them."""
        state = State()
        for event in events:
            state, _ = self.step(state, event)
        return state

    # The run's own life

    def _created(self, state: State, event: RunCreated) -> Transition:
        per_replica = self.job.nodes.max // self.replicas
        nodes = tuple(NodeState(node=index, replica=index // per_replica) for index in range(self.job.nodes.max))
        replicas = tuple(ReplicaState(replica=index) for index in range(self.replicas))
        return State(nodes=nodes, replicas=replicas), ()

    def _controller_started(self, state: State, event: ControllerStarted) -> Transition:
        """No connection survives a controller: every agent is away until it has joined this one, with its time anew."""
        if state.ending and state.done:
            return state, (Finish(),)
        commands = self._ask_again(state, event.at)
        for node in state.nodes:
            if node.phase is not NodePhase.REQUESTED:
                state = _away(state, node, event.at)
        for replica in state.replicas:
            if replica.phase is ReplicaPhase.JUDGING:
                state = state.with_deadline(_judge_key(replica.replica), event.at + JUDGE_S)
            elif replica.phase is ReplicaPhase.STOPPING:
                state = state.with_deadline(_stop_key(replica.replica), None)
                state, more = self._stop_busy(state, replica.replica, event.at)
                commands = (*commands, *more)
        return state, commands

    def _ask_again(self, state: State, at: float) -> Commands:
        """Ask for the nodes that are needed and not there: whether they were asked for before is not known."""
        if state.ending:
            return ()
        done = {replica.replica for replica in state.replicas if replica.phase is ReplicaPhase.DONE}
        waiting = tuple(
            node.place for node in state.nodes if node.phase is NodePhase.REQUESTED and node.replica not in done
        )
        requests = (NodeRequested(at=at, node=place.node, generation=place.generation) for place in waiting)
        fresh = tuple(place for place in waiting if place.generation == 0)
        again = "the controller was replaced before this was known to be done"
        return (
            *(Record(event=request) for request in requests),
            *((SubmitNodes(places=fresh),) if fresh else ()),
            *(ReplaceNode(place=place, reason=again) for place in waiting if place.generation > 0),
        )

    def _finished(self, state: State, event: RunFinished) -> Transition:
        return replace(state, finished=True, deadlines={}), ()

    # Nodes and their agents

    def _agent_joined(self, state: State, event: AgentJoined) -> Transition:
        """A node is there (again): give it whatever it has missed."""
        node = state.nodes[event.node]
        if event.generation != node.generation:
            return state, ()
        reborn = node.busy and bool(node.incarnation) and node.incarnation != event.incarnation
        node = replace(
            node,
            phase=NodePhase.JOINED,
            incarnation=event.incarnation,
            address=event.address,
            port=event.port,
            busy=node.busy and not reborn,
        )
        state = state.with_node(node).with_deadline(_away_key(node.node), None)
        commands: Commands = self._pending_drills(state, node.node)
        if reborn:
            reason = "its agent was restarted, and ranks die with their agent"
            state, more = self._fail(state, (node,), event.at, reason)
            return state, (*commands, *more)
        replica = state.replicas[node.replica]
        match replica.phase:
            case ReplicaPhase.RUNNING | ReplicaPhase.JUDGING if event.attempt < replica.attempt and node.busy:
                commands = (*commands, _start(replica, (node,)))
            case ReplicaPhase.STOPPING | ReplicaPhase.GATHERING | ReplicaPhase.DONE if node.busy:
                commands = (*commands, _stop(replica, (node,), state.ending.grace_s if state.ending else 0.0))
            case _:
                pass
        state, more = self._proceed(state, node.replica, event.at)
        return state, (*commands, *more)

    def _agent_left(self, state: State, event: AgentLeft) -> Transition:
        node = state.nodes[event.node]
        if event.generation != node.generation or event.incarnation != node.incarnation:
            return state, ()
        return _away(state, node, event.at), ()

    def _node_gone(self, state: State, event: NodeGone) -> Transition:
        node = state.nodes[event.node]
        if event.generation != node.generation:
            return state, ()
        return self._lose(state, (node,), event.at, event.reason)

    def _lose(
        self, state: State, nodes: tuple[NodeState, ...], at: float, reason: str, *, failed_at: float | None = None
    ) -> Transition:
        """Nodes of a replica are lost: what ran on them, or was about to, has failed; their slots are filled again."""
        gone = tuple(
            replace(node, phase=NodePhase.REQUESTED, busy=False, incarnation="", generation=node.generation + 1)
            for node in nodes
        )
        for node in gone:
            state = state.with_node(node).with_deadline(_away_key(node.node), None)
        index = nodes[0].replica
        phase = state.replicas[index].phase
        if state.ending or phase is ReplicaPhase.DONE:
            return self._proceed(state, index, at)
        commands: Commands = ()
        if any(node.busy for node in nodes) or phase not in (ReplicaPhase.RUNNING, ReplicaPhase.JUDGING):
            state, commands = self._fail(state, gone, at, reason, failed_at=failed_at)
        if state.ending:
            return state, commands
        requests = (NodeRequested(at=at, node=node.node, generation=node.generation, reason=reason) for node in gone)
        records = (Record(event=request) for request in requests)
        return state, (*commands, *records, *(ReplaceNode(place=node.place, reason=reason) for node in gone))

    def _fail(
        self, state: State, nodes: tuple[NodeState, ...], at: float, reason: str, *, failed_at: float | None = None
    ) -> Transition:
        """What ran on these nodes is gone, so their replica fails."""
        replica = state.replicas[nodes[0].replica]
        losses = tuple(
            Failure(
                kind=FailureKind.NODE_LOST,
                at=at if failed_at is None else failed_at,
                node=node.node,
                attempt=replica.attempt,
                error=reason,
                step=replica.step,
                lived_s=at - replica.started_at,
            )
            for node in nodes
        )
        state = state.with_replica(replace(replica, losses=(*replica.losses, *losses)))
        return self._halt(state, replica.replica, at)

    # Ranks

    def _rank_exited(self, state: State, event: RankExited) -> Transition:
        replica = state.replicas[event.replica]
        if event.attempt != replica.attempt or replica.phase in (ReplicaPhase.GATHERING, ReplicaPhase.DONE):
            return state, ()
        state = state.with_replica(replace(replica, exits=(*replica.exits, event)))
        if replica.phase is ReplicaPhase.STOPPING:
            return state, ()
        if event.stopped:
            reason = "its agent, long without a controller, stopped its ranks"
            return self._fail(state, (state.nodes[event.node],), event.at, reason)
        return self._halt(state, event.replica, event.at) if is_failure(event) else (state, ())

    def _rank_hung(self, state: State, event: RankHung) -> Transition:
        """Wait for the other ranks' word: in a hang everybody waits, and the one to blame differs only in its stack."""
        replica = state.replicas[event.replica]
        if event.attempt != replica.attempt or replica.phase not in (ReplicaPhase.RUNNING, ReplicaPhase.JUDGING):
            return state, ()
        replica = replace(replica, phase=ReplicaPhase.JUDGING, hangs=(*replica.hangs, event))
        state = state.with_replica(replica)
        if len({hung.rank for hung in replica.hangs}) >= len(state.nodes_of(event.replica)) * self.job.local_world_size:
            return self._halt(state, event.replica, event.at)
        if _judge_key(event.replica) not in state.deadlines:
            state = state.with_deadline(_judge_key(event.replica), event.at + JUDGE_S)
        return state, ()

    def _ranks_stopped(self, state: State, event: RanksStopped) -> Transition:
        node = state.nodes[event.node]
        replica = state.replicas[event.replica]
        if event.attempt != replica.attempt or not node.busy:
            return state, ()
        state = state.with_node(replace(node, busy=False, port=event.port))
        return self._proceed(state, event.replica, event.at)

    def _step_committed(self, state: State, event: StepCommitted) -> Transition:
        replica = state.replicas[event.replica]
        state = state.with_replica(replace(replica, step=max(replica.step, event.step)))
        due = tuple(
            drill
            for drill in state.drills
            if drill.target is DrillTarget.CONTROLLER and event.step >= (drill.at_step or 0)
        )
        if due:
            state = replace(state, drills=tuple(drill for drill in state.drills if drill not in due))
        return state, tuple(Inject(drill=drill, node=None) for drill in due)

    # People

    def _cancel(self, state: State, event: CancelRequested) -> Transition:
        if state.ending and not event.force:
            return state, ()
        grace_s = 0.0 if event.force else self.job.recovery.stop_grace_s
        asked = Ending(outcome=Outcome.CANCELLED, exit_code=ExitCode.CANCELLED, reason="cancelled on request")
        return self._end(state, replace(state.ending or asked, grace_s=grace_s), event.at)

    def _drill(self, state: State, event: DrillRequested) -> Transition:
        if event.target is DrillTarget.CONTROLLER and event.at_step is None:
            return state, (Inject(drill=event, node=None),)
        state = replace(state, drills=(*state.drills, event))
        node = self._drilled_node(event)
        return state, (Inject(drill=event, node=node),) if node is not None else ()

    def _drill_done(self, state: State, event: DrillDone) -> Transition:
        return replace(state, drills=tuple(drill for drill in state.drills if drill.at != event.requested_at)), ()

    def _drilled_node(self, drill: DrillRequested) -> int | None:
        match drill.target:
            case DrillTarget.RANK:
                return drill.index // self.job.local_world_size
            case DrillTarget.NODE | DrillTarget.AGENT:
                return drill.index
            case DrillTarget.CONTROLLER:
                return None

    def _pending_drills(self, state: State, node: int) -> Commands:
        return tuple(Inject(drill=drill, node=node) for drill in state.drills if self._drilled_node(drill) == node)

    def _checkpoint(self, state: State, event: CheckpointRequested) -> Transition:
        return state, (Checkpoint(),)

    # Time

    def _deadline(self, state: State, event: DeadlinePassed) -> Transition:
        if event.deadline not in state.deadlines:
            return state, ()
        state = state.with_deadline(event.deadline, None)
        kind, _, index = event.deadline.partition(":")
        match kind:
            case "away":
                reason = f"its agent has been out of reach for {AWAY_GRACE_S:g} s"
                away = (state.nodes[int(index)],)
                return self._lose(state, away, event.at, reason, failed_at=event.at - AWAY_GRACE_S)
            case "judge":
                return self._halt(state, int(index), event.at)
            case _:
                stubborn = tuple(node for node in state.nodes_of(int(index)) if node.busy)
                return self._lose(state, stubborn, event.at, "it could not end its ranks in time")

    # What follows from the state

    def _halt(self, state: State, index: int, at: float) -> Transition:
        """Stop every rank of a replica at once; what to do next is decided when all is quiet."""
        replica = state.replicas[index]
        commands: Commands = ()
        if replica.phase is not ReplicaPhase.STOPPING:
            state = state.with_replica(replace(replica, phase=ReplicaPhase.STOPPING))
            state, commands = self._stop_busy(state, index, at)
        state, more = self._proceed(state, index, at)
        return state, (*commands, *more)

    def _stop_busy(self, state: State, index: int, at: float) -> Transition:
        """Have the nodes that may have ranks end them; a deadline that stands already is not put off."""
        busy = tuple(node for node in state.nodes_of(index) if node.busy)
        if not busy:
            return state, ()
        grace_s = state.ending.grace_s if state.ending else 0.0
        latest = at + grace_s + STOP_GRACE_S
        state = state.with_deadline(_stop_key(index), min(latest, state.deadlines.get(_stop_key(index), latest)))
        return state, (_stop(state.replicas[index], busy, grace_s),)

    def _proceed(self, state: State, index: int, at: float) -> Transition:
        """Go on as far as the nodes allow: judge what is quiet, start what is gathered, finish what is done."""
        replica = state.replicas[index]
        nodes = state.nodes_of(index)
        if any(node.busy for node in nodes):
            return state, ()
        match replica.phase:
            case ReplicaPhase.RUNNING | ReplicaPhase.JUDGING | ReplicaPhase.STOPPING:
                state = state.with_deadline(_stop_key(index), None).with_deadline(_judge_key(index), None)
                return self._quiet(state, replica, at)
            case ReplicaPhase.GATHERING if all(node.ready for node in nodes):
                return self._launch(state, replica, nodes, at)
            case _:
                return state, ()

    def _quiet(self, state: State, replica: ReplicaState, at: float) -> Transition:
        """No rank of this attempt is left: it has succeeded, or is judged."""
        if state.ending or self._all_well(state, replica):
            state = state.with_replica(replace(replica, phase=ReplicaPhase.DONE))
            return self._done(state, at)
        failure = first_failure(replica)
        assert failure is not None, f"an attempt ended, and nobody knows why: {replica}"
        verdict = judge(failure, replica.failures, self.job.recovery)
        record = _record(replica, verdict, failure, at)
        after = replace(
            replica,
            phase=ReplicaPhase.GATHERING,
            failures=(*replica.failures, failure),
            exits=(),
            hangs=(),
            losses=(),
        )
        state = state.with_replica(after)
        if verdict.action is Action.STOP:
            ending = Ending(outcome=Outcome.FAILED, exit_code=verdict.exit_code, reason=verdict.finding.what)
            state, commands = self._end(state, ending, at, verdict)
        else:
            state, commands = self._proceed(state, replica.replica, at)
        return state, (record, *commands)

    def _all_well(self, state: State, replica: ReplicaState) -> bool:
        """Whether every process of the attempt ended by itself with code 0; what befell its node later is no matter."""
        per_node = 1 if self.job.launch is Launch.PER_NODE else self.job.local_world_size
        well = {exited.rank for exited in replica.exits if not exited.stopped and not is_failure(exited)}
        return len(well) == len(state.nodes_of(replica.replica)) * per_node

    def _launch(self, state: State, replica: ReplicaState, nodes: tuple[NodeState, ...], at: float) -> Transition:
        """Start the next attempt with the head node's fresh port: no address, port or key of a dead one."""
        head = nodes[0]
        replica = replace(
            replica,
            phase=ReplicaPhase.RUNNING,
            attempt=replica.attempt + 1,
            started_at=at,
            master_addr=head.address,
            master_port=head.port,
        )
        for node in nodes:
            state = state.with_node(replace(node, busy=True))
        started = AttemptStarted(
            at=at,
            replica=replica.replica,
            attempt=replica.attempt,
            world_size=len(nodes) * self.job.local_world_size,
            master_addr=head.address,
            master_port=head.port,
        )
        return state.with_replica(replica), (Record(event=started), _start(replica, nodes))

    def _end(self, state: State, ending: Ending, at: float, verdict: Verdict | None = None) -> Transition:
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
                    state, more = self._halt(state, replica.replica, at)
                case ReplicaPhase.STOPPING:
                    state, more = self._stop_busy(state, replica.replica, at)
                case ReplicaPhase.GATHERING:
                    state, more = self._done(state.with_replica(replace(replica, phase=ReplicaPhase.DONE)), at)
                case ReplicaPhase.DONE:
                    continue
            commands = (*commands, *more)
        return state, commands

    def _done(self, state: State, at: float) -> Transition:
        """A replica has ended; when it was the last, so has the run."""
        if not state.done:
            return state, ()
        if state.ending:
            return state, (Finish(),)
        ending = Ending(outcome=Outcome.SUCCEEDED, exit_code=ExitCode.OK, reason="every rank finished")
        decided = StopDecided(at=at, outcome=ending.outcome, reason=ending.reason, exit_code=ending.exit_code)
        return replace(state, ending=ending), (Record(event=decided), Finish())


def _away(state: State, node: NodeState, at: float) -> State:
    away = replace(node, phase=NodePhase.AWAY)
    return state.with_node(away).with_deadline(_away_key(node.node), at + AWAY_GRACE_S)


def _start(replica: ReplicaState, nodes: tuple[NodeState, ...]) -> Start:
    return Start(
        replica=replica.replica,
        attempt=replica.attempt,
        nodes=tuple(node.node for node in nodes),
        master_addr=replica.master_addr,
        master_port=replica.master_port,
    )


def _stop(replica: ReplicaState, nodes: tuple[NodeState, ...], grace_s: float) -> Stop:
    numbers = tuple(node.node for node in nodes)
    return Stop(replica=replica.replica, attempt=replica.attempt, nodes=numbers, grace_s=grace_s)


def _record(replica: ReplicaState, verdict: Verdict, failure: Failure, at: float) -> Record:
    decided = RecoveryDecided(
        at=at,
        replica=replica.replica,
        attempt=replica.attempt,
        action=verdict.action.value,
        failed_at=failure.at,
        finding=verdict.finding,
        first_rank=failure.rank,
    )
    return Record(event=decided)


def _away_key(node: int) -> str:
    return f"away:{node}"


def _stop_key(replica: int) -> str:
    return f"stop:{replica}"


def _judge_key(replica: int) -> str:
    return f"judge:{replica}"


_TABLE: dict[type[AnyEvent], Callable[[Machine, State, Any], Transition]] = {
    RunCreated: Machine._created,
    ControllerStarted: Machine._controller_started,
    RunFinished: Machine._finished,
    AgentJoined: Machine._agent_joined,
    AgentLeft: Machine._agent_left,
    NodeGone: Machine._node_gone,
    RankExited: Machine._rank_exited,
    RankHung: Machine._rank_hung,
    RanksStopped: Machine._ranks_stopped,
    StepCommitted: Machine._step_committed,
    CancelRequested: Machine._cancel,
    DrillRequested: Machine._drill,
    DrillDone: Machine._drill_done,
    CheckpointRequested: Machine._checkpoint,
    DeadlinePassed: Machine._deadline,
}
