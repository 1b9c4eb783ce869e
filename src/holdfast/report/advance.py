"""Owns the fold from a run's events to its status: a table by event type.

`RunStatus()` is a run of which nothing is known; `advance` takes one event. What a status is, is in status.py. A long
file, because it is one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from typing import Any

from msgspec import structs

from holdfast.events import (
    AgentJoined,
    AgentLeft,
    AnyEvent,
    AttemptStarted,
    CancelRequested,
    CheckpointCommitted,
    CodeShipped,
    ControllerStarted,
    DrillDone,
    FindingRaised,
    NodeGone,
    NodeMade,
    NodeRequested,
    NodesStarted,
    NodesStopped,
    NodeUnavailable,
    RankExit,
    RankExited,
    RankHung,
    RanksExited,
    RanksHung,
    RanksStarted,
    RanksStopped,
    RanksWarmed,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    StandbyPromoted,
    StandbyReady,
    StepCommitted,
    StopDecided,
    WorldChanged,
    numbers,
)
from holdfast.events.log import EventReader
from holdfast.findings import Finding, Severity
from holdfast.folder import RunFolder
from holdfast.job import drilled
from holdfast.report.ranks import Change, RankPhase, Ranks, RankStatus
from holdfast.report.status import (
    CheckpointStatus,
    NodePhase,
    NodeStatus,
    ReplicaStatus,
    RunStatus,
    StepTime,
)
from holdfast.report.world import observed
from holdfast.shortage import settled

WINDOW_STEPS = 20
"""Steps over which speed is measured."""
FINDINGS_KEPT = 10
STOP = "stop"
"""The decision after which a failure ends the run."""


def advance(status: RunStatus, event: AnyEvent) -> RunStatus:
    """Take one event; kinds that change nothing here leave the status as it is."""
    handler = _TABLE.get(type(event))
    return handler(status, event) if handler else status


def fold(events: Iterable[AnyEvent], status: RunStatus | None = None) -> RunStatus:
    """The status after all of these, from the one before them or from nothing."""
    status = status or RunStatus()
    for event in events:
        status = advance(status, event)
    return status


def status_of(run: RunFolder) -> RunStatus:
    """How a run is doing, or how it went, by its log."""
    reader = EventReader(run.events)
    return replace(fold(reader.read(), RunStatus(run=run.run)), damaged_lines=reader.damaged_lines)


def exit_in_words(event: RankExited | RanksExited) -> str:
    """`exited with code 1`, `ended by signal 9`."""
    match event.how:
        case RankExit.CODE:
            return f"exited with code {event.code}"
        case RankExit.SIGNAL:
            return f"ended by signal {event.code}"
        case RankExit.OUT_OF_MEMORY:
            return "ended for lack of memory"
        case RankExit.PORT_TAKEN:
            return "found its rendezvous port taken"
        case RankExit.LEFT_RANKS:
            return "left ranks at work"
        case RankExit.NO_CODE:
            return "did not get its code"
        case RankExit.NOT_STARTED:
            return "could not be started"


# The run


def _created(status: RunStatus, event: RunCreated) -> RunStatus:
    job = str(event.job.get("name") or event.run.rpartition("-")[0])
    nodes = event.job.get("nodes", {})
    least = nodes["min"] if nodes and nodes["min"] < nodes["max"] else 0
    return RunStatus(run=event.run, job=job, created_at=event.at, least_nodes=least)


def _code_shipped(status: RunStatus, event: CodeShipped) -> RunStatus:
    return replace(status, code=event.digest)


def _controller_started(status: RunStatus, event: ControllerStarted) -> RunStatus:
    """No connection survives a controller."""
    nodes = {
        index: replace(node, phase=NodePhase.AWAY) if node.phase is NodePhase.JOINED else node
        for index, node in status.nodes.items()
    }
    return replace(status, controller_pid=event.pid, clock=event.clock, nodes=nodes)


def _cancel_requested(status: RunStatus, event: CancelRequested) -> RunStatus:
    return replace(status, cancelling=True)


def _stop_decided(status: RunStatus, event: StopDecided) -> RunStatus:
    status = replace(status, ending=event.outcome, reason=event.reason, exit_code=event.exit_code)
    return _with_finding(status, event.finding, event) if event.finding else status


def _finished(status: RunStatus, event: RunFinished) -> RunStatus:
    """Nothing is left of a run's nodes when it is over."""
    return replace(
        status,
        finished_at=event.at,
        ending=event.outcome,
        exit_code=event.exit_code,
        reason=event.reason or status.reason,
        nodes={index: replace(node, phase=NodePhase.GONE) for index, node in status.nodes.items()},
    )


def _finding_raised(status: RunStatus, event: FindingRaised) -> RunStatus:
    return _with_finding(status, event.finding, event)


def _with_finding(status: RunStatus, finding: Finding, event: AnyEvent) -> RunStatus:
    """A decision to stop repeats the finding of the failure before it; that is one finding."""
    finding = drilled.told(finding, drilled.behind_of(status.drills, event))
    known, at = status.findings, status.findings_at
    if any(_is_same(finding, last) for last in known[-1:]):
        again = structs.replace(known[-1], severity=finding.severity)
        return replace(status, findings=(*known[:-1], again), findings_at=(*at[:-1], event.at))
    known = (*(settled(one, finding) for one in known), finding)
    return replace(status, findings=known[-FINDINGS_KEPT:], findings_at=(*at, event.at)[-FINDINGS_KEPT:])


# Nodes


def _node_requested(status: RunStatus, event: NodeRequested) -> RunStatus:
    status = _lose_ranks(status, event.node) if event.generation > 0 else status
    asked = NodeStatus(node=event.node, generation=event.generation, reason=event.reason, standby=event.standby)
    return _with_node(status, asked)


def _standby_ready(status: RunStatus, event: StandbyReady) -> RunStatus:
    known = status.nodes.get(event.node)
    if known is None or known.generation != event.generation:
        return status
    return _with_node(status, replace(known, ready=True))


def _standby_promoted(status: RunStatus, event: StandbyPromoted) -> RunStatus:
    for node, standby in ((event.node, False), (event.instead_of, True)):
        if known := status.nodes.get(node):
            status = _with_node(status, replace(known, standby=standby, ready=False))
    return status


def _node_made(status: RunStatus, event: NodeMade) -> RunStatus:
    return _while_missing(status, event.node, event.generation, NodePhase.MADE)


def _node_unavailable(status: RunStatus, event: NodeUnavailable) -> RunStatus:
    return _while_missing(status, event.node, event.generation, NodePhase.UNAVAILABLE, event.reason)


def _while_missing(status: RunStatus, node: int, generation: int, phase: NodePhase, reason: str = "") -> RunStatus:
    known = status.nodes.get(node)
    missing = (NodePhase.REQUESTED, NodePhase.UNAVAILABLE, NodePhase.MADE)
    if known is None or known.generation != generation or known.phase not in missing:
        return status
    return _with_node(status, replace(known, phase=phase, reason=reason or known.reason))


def _agent_joined(status: RunStatus, event: AgentJoined) -> RunStatus:
    known = status.nodes.get(event.node)
    if known and known.generation > event.generation:
        return status
    joined = NodeStatus(
        node=event.node,
        generation=event.generation,
        phase=NodePhase.JOINED,
        hostname=event.hostname,
        incarnation=event.incarnation,
        standby=known is not None and known.standby,
        ready=known is not None and known.ready and known.incarnation == event.incarnation,
    )
    return _with_node(status, joined)


def _agent_left(status: RunStatus, event: AgentLeft) -> RunStatus:
    known = status.nodes.get(event.node)
    if known is None or (known.generation, known.incarnation) != (event.generation, event.incarnation):
        return status
    return _with_node(status, replace(known, phase=NodePhase.GONE if status.ending else NodePhase.AWAY))


def _node_gone(status: RunStatus, event: NodeGone) -> RunStatus:
    known = status.nodes.get(event.node)
    if known is None or known.generation != event.generation:
        return status
    return _lose_ranks(_with_node(status, replace(known, phase=NodePhase.GONE, reason=event.reason)), event.node)


def _with_node(status: RunStatus, node: NodeStatus) -> RunStatus:
    nodes = dict(status.nodes)
    in_order = node.node in nodes or node.node > next(reversed(nodes), -1)
    nodes[node.node] = node
    return replace(status, nodes=nodes if in_order else dict(sorted(nodes.items())))


def _lose_ranks(status: RunStatus, node: int) -> RunStatus:
    for replica in status.replicas.values():
        status = _with_replica(status, _ended(replica, {node}, RankPhase.LOST))
    return status


# Replicas and ranks


def _attempt_started(status: RunStatus, event: AttemptStarted) -> RunStatus:
    before = _replica(status, event.replica)
    after = replace(before, attempt=event.attempt, world_size=event.world_size, ranks=Ranks(), metrics={}, window=())
    code = event.code or status.code
    return _with_replica(replace(status, code=code, restarts=status.restarts + (event.attempt > 0)), after)


def _world_changed(status: RunStatus, event: WorldChanged) -> RunStatus:
    return _with_replica(status, replace(_replica(status, event.replica), world=event))


def _ranks_started(status: RunStatus, event: RanksStarted) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt < replica.attempt:
        return status
    started = {state.rank: RankStatus(rank=state.rank, node=event.node, pid=state.pid) for state in event.ranks}
    return _with_replica(status, _started(replica, lambda known: known.update(started)))


def _ranks_warmed(status: RunStatus, event: RanksWarmed) -> RunStatus:
    replica = _replica(status, event.replica)
    return _with_replica(status, replace(replica, warm=replica.warm | frozenset(event.ranks)))


def _nodes_started(status: RunStatus, event: NodesStarted) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt < replica.attempt:
        return status

    def start(known: dict[int, RankStatus]) -> None:
        nodes, ranks = list(numbers(event.nodes)), list(numbers(event.ranks))
        each = max(1, len(ranks) // len(nodes))
        known.update((rank, RankStatus(rank=rank, node=nodes[index // each])) for index, rank in enumerate(ranks))

    return _with_replica(status, _started(replica, start))


def _started(replica: ReplicaStatus, start: Change) -> ReplicaStatus:
    # A job that reports no steps has recovered when it runs again.
    recovering = replica.recovering and replica.step is not None
    return replace(replica, ranks=replica.ranks.after(start), recovering=recovering)


def _step_committed(status: RunStatus, event: StepCommitted) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt < replica.attempt:
        return status
    tokens = event.metrics.get("tokens")
    time = StepTime(first=event.first, step=event.step, started=event.started, ended=event.ended, tokens=tokens)
    total = event.metrics.get("total_steps")
    world = replica.world
    if world is not None and world.attempt == event.attempt:
        world = observed(world, event)
    after = replace(
        replica,
        step=event.step,
        world=world,
        total_steps=replica.total_steps if total is None else int(total),
        loss=event.metrics.get("loss", replica.loss),
        metrics={**replica.metrics, **event.metrics, **_stall(event)},
        window=(*replica.window, time)[-WINDOW_STEPS:],
        recovering=False,
    )
    return _with_replica(status, after)


def _stall(event: StepCommitted) -> dict[str, float]:
    """What the latest checkpoint cost the loop: most steps have none."""
    return {"checkpoint_stall_s": event.checkpoint_s} if event.checkpoint_s > 0 else {}


def _rank_exited(status: RunStatus, event: RankExited) -> RunStatus:
    last_step = event.last_step if event.last_step >= 0 else None
    return _with_rank(status, event, _phase_after(event), exit_in_words(event), last_step)


def _phase_after(event: RankExited | RanksExited) -> RankPhase:
    return RankPhase.STOPPED if event.stopped else RankPhase.FAILED if event.failed else RankPhase.EXITED


def _ranks_exited(status: RunStatus, event: RanksExited) -> RunStatus:
    return _with_ranks(status, event, _phase_after(event), exit_in_words(event))


def _ranks_hung(status: RunStatus, event: RanksHung) -> RunStatus:
    return _with_ranks(status, event, RankPhase.HUNG, "")


def _with_ranks(status: RunStatus, event: RanksExited | RanksHung, phase: RankPhase, detail: str) -> RunStatus:
    """Ranks that are known, with what happened to all of them."""
    replica = _replica(status, event.replica)
    if event.attempt != replica.attempt:
        return status

    def end(known: dict[int, RankStatus]) -> None:
        for rank in numbers(event.ranks):
            if rank in known:
                known[rank] = replace(known[rank], phase=phase, detail=detail)

    return _with_replica(status, replace(replica, ranks=replica.ranks.after(end)))


def _rank_hung(status: RunStatus, event: RankHung) -> RunStatus:
    where = f" in {event.innermost}" if event.innermost else ""
    detail = f"no step for {event.waited_s:.0f} s{where}"
    return _with_rank(status, event, RankPhase.HUNG, detail, event.last_step if event.last_step >= 0 else None)


def _with_rank(
    status: RunStatus, event: RankExited | RankHung, phase: RankPhase, detail: str, last_step: int | None
) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt != replica.attempt:
        return status

    def end(known: dict[int, RankStatus]) -> None:
        before = known.get(event.rank) or RankStatus(rank=event.rank, node=event.node)
        known[event.rank] = replace(before, phase=phase, detail=detail, last_step=last_step)

    return _with_replica(status, replace(replica, ranks=replica.ranks.after(end)))


def _ranks_stopped(status: RunStatus, event: RanksStopped) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt != replica.attempt:
        return status
    return _with_replica(status, _ended(replica, {event.node}, RankPhase.STOPPED))


def _nodes_stopped(status: RunStatus, event: NodesStopped) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt != replica.attempt:
        return status
    return _with_replica(status, _ended(replica, set(numbers(event.nodes)), RankPhase.STOPPED))


def _ended(replica: ReplicaStatus, nodes: Set[int], phase: RankPhase) -> ReplicaStatus:
    """Whatever still ran on these nodes runs no longer."""
    over = (RankPhase.RUNNING, RankPhase.HUNG)

    def end(known: dict[int, RankStatus]) -> None:
        for rank, before in known.items():
            if before.node in nodes and before.phase in over:
                known[rank] = replace(before, phase=phase)

    return replace(replica, ranks=replica.ranks.after(end))


def _is_same(finding: Finding, known: Finding) -> bool:
    """Whether it is one that was told before; of that it may have been told that a drill did it."""
    alike = (finding.code, finding.evidence) == (known.code, known.evidence)
    return alike and known.what.startswith(finding.what)


def _recovery_decided(status: RunStatus, event: RecoveryDecided) -> RunStatus:
    status = _with_replica(status, replace(_replica(status, event.replica), recovering=True))
    finding = event.finding
    if event.action != STOP:
        finding = structs.replace(finding, severity=Severity.WARNING)
    status = _with_finding(status, finding, event)
    return replace(status, drills=drilled.after(status.drills, event))


def _drill_done(status: RunStatus, event: DrillDone) -> RunStatus:
    return replace(status, drills=drilled.after(status.drills, event))


def _checkpoint_committed(status: RunStatus, event: CheckpointCommitted) -> RunStatus:
    return replace(status, checkpoint=CheckpointStatus(at=event.at, step=event.step, path=event.path))


def _replica(status: RunStatus, index: int) -> ReplicaStatus:
    return status.replicas.get(index) or ReplicaStatus(replica=index)


def _with_replica(status: RunStatus, replica: ReplicaStatus) -> RunStatus:
    return replace(status, replicas={**status.replicas, replica.replica: replica})


_TABLE: dict[type[AnyEvent], Callable[[RunStatus, Any], RunStatus]] = {
    RunCreated: _created,
    CodeShipped: _code_shipped,
    ControllerStarted: _controller_started,
    CancelRequested: _cancel_requested,
    StopDecided: _stop_decided,
    RunFinished: _finished,
    FindingRaised: _finding_raised,
    DrillDone: _drill_done,
    NodeRequested: _node_requested,
    StandbyReady: _standby_ready,
    StandbyPromoted: _standby_promoted,
    AgentJoined: _agent_joined,
    AgentLeft: _agent_left,
    NodeGone: _node_gone,
    NodeMade: _node_made,
    NodeUnavailable: _node_unavailable,
    WorldChanged: _world_changed,
    AttemptStarted: _attempt_started,
    RanksStarted: _ranks_started,
    RanksWarmed: _ranks_warmed,
    StepCommitted: _step_committed,
    RankExited: _rank_exited,
    RankHung: _rank_hung,
    RanksStopped: _ranks_stopped,
    NodesStarted: _nodes_started,
    NodesStopped: _nodes_stopped,
    RanksExited: _ranks_exited,
    RanksHung: _ranks_hung,
    RecoveryDecided: _recovery_decided,
    CheckpointCommitted: _checkpoint_committed,
}
