"""The reducer from a run's events to its status: a table by event type.

`update_status` applies one event, starting from `RunStatus()`; run_status.py defines the status. Every view of a run
is a projection of it, so each fact is derived from events here only. The file is long because it is one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

from msgspec.structs import replace

from holdfast import events
from holdfast.events import AnyEvent, ExitReason, from_ranges
from holdfast.events.log import EventReader
from holdfast.events.probe_results import STAGE_TEXT
from holdfast.findings import Finding, Severity
from holdfast.job import fault_attribution
from holdfast.os_errors import resolved
from holdfast.report.goodput import ReplicaLedger, microseconds
from holdfast.report.rank_table import RankPhase, RankStatus, RankTable, RankUpdate
from holdfast.report.run_status import (
    CheckpointStatus,
    FabricStatus,
    NodePhase,
    NodeStatus,
    ReplicaStatus,
    RunStatus,
    StepTime,
)
from holdfast.report.world_size_text import with_observed_batch
from holdfast.run_dir import RunDir

SPEED_WINDOW_STEPS = 20
"""Number of steps over which speed is measured."""
FINDINGS_KEPT = 10
STOP_ACTION = "stop"
"""The decision by which a failure ends the run."""
IGNORE_ACTION = "ignore: another replica has finished"
"""The decision by which a failure changes nothing: its replica does not start again."""


def update_status(status: RunStatus, event: AnyEvent) -> RunStatus:
    """Apply one event; other event types leave the status unchanged."""
    handler = _TABLE.get(type(event))
    return handler(status, event) if handler else status


def status_from_events(log: Iterable[AnyEvent], status: RunStatus | None = None) -> RunStatus:
    """Apply all events to `status`, or to an empty status."""
    status = status or RunStatus()
    for event in log:
        status = update_status(status, event)
    return status


def read_status(run: RunDir) -> RunStatus:
    """The status of a run, from its event log."""
    reader, empty = EventReader(run.events), RunStatus(run=run.run_id)
    status = status_from_events(reader.read(), empty)
    without_beginning = status.created_at is None and status != empty
    return replace(status, corrupt_lines=reader.corrupt_line_count or int(without_beginning))


def format_exit(event: events.RankExited | events.RanksExited) -> str:
    """`exited with code 1`, `ended by signal 9`."""
    match event.reason:
        case ExitReason.CODE:
            return f"exited with code {event.code}"
        case ExitReason.SIGNAL:
            return f"ended by signal {event.code}"
        case ExitReason.OUT_OF_MEMORY:
            return "ended for lack of memory"
        case ExitReason.PORT_TAKEN:
            return "found its rendezvous port in use"
        case ExitReason.ORPHANED_RANKS:
            return "left orphaned ranks"
        case ExitReason.CODE_DELIVERY_FAILED:
            return "did not get its code"
        case ExitReason.NOT_STARTED:
            return "could not be started"


# The run


def _created(status: RunStatus, event: events.RunCreated) -> RunStatus:
    job = str(event.job.get("name") or event.run.rpartition("-")[0])
    nodes = event.job.get("nodes", {})
    least = nodes["min"] if nodes and nodes["min"] < nodes["max"] else 0
    return RunStatus(
        run=event.run,
        job=job,
        created_at=event.at,
        min_nodes=least,
        resumed_run=event.resumed_run,
        resumed_step=event.resumed_step,
    )


def _code_shipped(status: RunStatus, event: events.CodeShipped) -> RunStatus:
    return replace(status, code=event.digest)


def _controller_started(status: RunStatus, event: events.ControllerStarted) -> RunStatus:
    """Agent connections do not survive a controller."""
    nodes = {
        index: replace(node, phase=NodePhase.UNREACHABLE) if node.phase is NodePhase.JOINED else node
        for index, node in status.nodes.items()
    }
    return replace(status, controller_pid=event.pid, clock=event.clock, nodes=nodes)


def _cancel_requested(status: RunStatus, event: events.CancelRequested) -> RunStatus:
    return replace(status, cancelling=True)


def _shutdown_decided(status: RunStatus, event: events.ShutdownDecided) -> RunStatus:
    status = replace(
        status,
        outcome=event.outcome,
        reason=event.reason,
        exit_code=event.exit_code,
        history=replace(status.history, end=event.finding),
        ledgers=_stopping(status, event.at),
    )
    return _with_finding(status, event.finding, event) if event.finding else status


def _finished(status: RunStatus, event: events.RunFinished) -> RunStatus:
    """All nodes are gone when the run is finished."""
    at = microseconds(event.at)
    return replace(
        status,
        finished_at=event.at,
        outcome=event.outcome,
        exit_code=event.exit_code,
        reason=event.reason or status.reason,
        nodes={index: replace(node, phase=NodePhase.GONE) for index, node in status.nodes.items()},
        ledgers={index: ledger.wait_until(at) for index, ledger in _stopping(status, event.at).items()},
    )


def _stopping(status: RunStatus, at: float) -> dict[int, ReplicaLedger]:
    """The ledgers of a run that is ending, which may not have started any replica."""
    return {index: ledger.shutdown_decided(at) for index, ledger in (status.ledgers or {0: status.ledger(0)}).items()}


def _update_ended(status: RunStatus, event: events.UpdateEnded) -> RunStatus:
    return replace(status, history=replace(status.history, updates=(*status.history.updates, event)))


def _finding_raised(status: RunStatus, event: events.FindingRaised) -> RunStatus:
    fault = fault_attribution.injected_cause(status.injected_faults, event)
    status = replace(status, history=status.history.with_finding(event.finding, fault))
    return _with_finding(status, event.finding, event)


def _with_finding(status: RunStatus, finding: Finding, event: AnyEvent) -> RunStatus:
    """A decision to stop repeats the finding of the failure before it; record it once."""
    finding = fault_attribution.with_injected_cause(
        finding, fault_attribution.injected_cause(status.injected_faults, event)
    )
    known, at = status.findings, status.findings_at
    if any(_is_same(finding, last) for last in known[-1:]):
        again = replace(known[-1], severity=finding.severity)
        return replace(status, findings=(*known[:-1], again), findings_at=(*at[:-1], event.at))
    known = (*(resolved(one, finding) for one in known), finding)
    return replace(status, findings=known[-FINDINGS_KEPT:], findings_at=(*at, event.at)[-FINDINGS_KEPT:])


# Nodes


def _node_requested(status: RunStatus, event: events.NodeRequested) -> RunStatus:
    status = _lose_ranks(status, event.node) if event.generation > 0 else status
    node = NodeStatus(node=event.node, generation=event.generation, reason=event.reason, standby=event.standby)
    return _with_node(status, node)


def _standby_ready(status: RunStatus, event: events.StandbyReady) -> RunStatus:
    known = status.nodes.get(event.node)
    if known is None or known.generation != event.generation:
        return status
    return _with_node(status, replace(known, ready=True))


def _monitors_started(status: RunStatus, event: events.MonitorsStarted) -> RunStatus:
    known = status.nodes.get(event.node)
    if known is None or known.generation != event.generation:
        return status
    return _with_node(status, replace(known, sources=event.sources, missing_sources=event.missing))


def _standby_promoted(status: RunStatus, event: events.StandbyPromoted) -> RunStatus:
    for node, standby in ((event.node, False), (event.replaces, True)):
        if known := status.nodes.get(node):
            status = _with_node(status, replace(known, standby=standby, ready=False))
    return status


def _node_created(status: RunStatus, event: events.NodeCreated) -> RunStatus:
    return _while_missing(status, event.node, event.generation, NodePhase.CREATED)


def _node_unavailable(status: RunStatus, event: events.NodeUnavailable) -> RunStatus:
    return _while_missing(status, event.node, event.generation, NodePhase.UNAVAILABLE, event.reason)


def _while_missing(status: RunStatus, node: int, generation: int, phase: NodePhase, reason: str = "") -> RunStatus:
    known = status.nodes.get(node)
    missing = (NodePhase.REQUESTED, NodePhase.UNAVAILABLE, NodePhase.CREATED)
    if known is None or known.generation != generation or known.phase not in missing:
        return status
    return _with_node(status, replace(known, phase=phase, reason=reason or known.reason))


def _agent_connected(status: RunStatus, event: events.AgentConnected) -> RunStatus:
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
    if known is not None and known.incarnation != event.incarnation:
        status = _lose_zygotes(status, event.node)
    return _with_node(status, joined)


def _agent_disconnected(status: RunStatus, event: events.AgentDisconnected) -> RunStatus:
    known = status.nodes.get(event.node)
    if known is None or (known.generation, known.incarnation) != (event.generation, event.incarnation):
        return status
    return _with_node(status, replace(known, phase=NodePhase.GONE if status.outcome else NodePhase.UNREACHABLE))


def _node_terminated(status: RunStatus, event: events.NodeTerminated) -> RunStatus:
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
    return _lose_zygotes(status, node)


def _lose_zygotes(status: RunStatus, node: int) -> RunStatus:
    """The zygotes of a node end with its agent."""
    for replica in status.replicas.values():
        if node in replica.zygotes:
            rest = {other: ranks for other, ranks in replica.zygotes.items() if other != node}
            status = _with_replica(status, replace(replica, zygotes=rest))
    return status


# Replicas and ranks


def _attempt_started(status: RunStatus, event: events.AttemptStarted) -> RunStatus:
    before = _replica(status, event.replica)
    after = replace(
        before,
        attempt=event.attempt,
        world_size=event.world_size,
        hung_at=None,
        ranks=RankTable(),
        metrics={},
        first_step=None,
        recent_steps=(),
        step_times=None,
        fabric=None,
        probe_stage="",
        sockets={},
    )
    status = _with_ledger(status, event.replica, status.ledger(event.replica).attempt_started(event))
    code = event.code_digest or status.code
    return _with_replica(replace(status, code=code, restarts=status.restarts + (event.attempt > 0)), after)


def _world_size_changed(status: RunStatus, event: events.WorldSizeChanged) -> RunStatus:
    changes = (*status.history.world_size_changes, event)
    status = replace(status, history=replace(status.history, world_size_changes=changes))
    return _with_replica(status, replace(_replica(status, event.replica), world_size_change=event))


def _ranks_started(status: RunStatus, event: events.RanksStarted) -> RunStatus:
    started = {state.rank: RankStatus(rank=state.rank, node=event.node, pid=state.pid) for state in event.ranks}
    return _with_started(status, event, lambda known: known.update(started))


def _ranks_prewarmed(status: RunStatus, event: events.RanksPrewarmed) -> RunStatus:
    replica = _replica(status, event.replica)
    return _with_replica(status, replace(replica, zygotes={**replica.zygotes, event.node: frozenset(event.ranks)}))


def _nodes_started(status: RunStatus, event: events.NodesStarted) -> RunStatus:
    def start(known: dict[int, RankStatus]) -> None:
        nodes, ranks = list(from_ranges(event.nodes)), list(from_ranges(event.ranks))
        each = max(1, len(ranks) // len(nodes))
        known.update((rank, RankStatus(rank=rank, node=nodes[index // each])) for index, rank in enumerate(ranks))

    return _with_started(status, event, start)


def _with_started(status: RunStatus, event: events.RanksStarted | events.NodesStarted, start: RankUpdate) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt < replica.attempt:
        return status
    status = _with_ledger(status, event.replica, status.ledger(event.replica).ranks_started(event))
    # A job that reports no steps has recovered when its ranks run again.
    recovering = replica.recovering and replica.step is not None
    return _with_replica(status, replace(replica, ranks=replica.ranks.updated(start), recovering=recovering))


def _step_committed(status: RunStatus, event: events.StepCommitted) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt < replica.attempt:
        return status
    status = replace(
        status,
        ledgers={**status.ledgers, event.replica: status.ledger(event.replica).step_committed(event)},
        history=status.history.with_step(event, status.code),
    )
    tokens = event.metrics.get("tokens")
    time = StepTime(
        first=event.first,
        step=event.step,
        started=event.started,
        ended=event.ended,
        tokens=tokens,
        data_wait_s=event.metrics.get("data_wait_s"),
    )
    total = event.metrics.get("total_steps")
    world = replica.world_size_change
    if world is not None and world.attempt == event.attempt:
        world = with_observed_batch(world, event)
    after = replace(
        replica,
        step=event.step,
        world_size_change=world,
        total_steps=replica.total_steps if total is None else int(total),
        loss=event.metrics.get("loss", replica.loss),
        metrics={**replica.metrics, **event.metrics, **_stall(event)},
        first_step=event.first if replica.first_step is None else replica.first_step,
        recent_steps=(*replica.recent_steps, time)[-SPEED_WINDOW_STEPS:],
        recovering=False,
    )
    return _with_replica(status, _without_hang(after, event))


def _without_hang(replica: ReplicaStatus, event: events.StepCommitted) -> ReplicaStatus:
    """A replica that has completed a step since a rank was reported hung does not hang."""
    if replica.hung_at is None or event.ended <= replica.hung_at:
        return replica

    def clear(known: dict[int, RankStatus]) -> None:
        for rank, before in known.items():
            if before.phase is RankPhase.HUNG:
                known[rank] = replace(before, phase=RankPhase.RUNNING, detail="", last_step=None)

    return replace(replica, hung_at=None, ranks=replica.ranks.updated(clear))


def _stall(event: events.StepCommitted) -> dict[str, float]:
    """The time the latest checkpoint cost the loop; most steps have none."""
    return {"checkpoint_stall_s": event.checkpoint_s} if event.checkpoint_s > 0 else {}


def _rank_exited(status: RunStatus, event: events.RankExited) -> RunStatus:
    last_step = event.last_step if event.last_step >= 0 else None
    return _with_rank(status, event, _phase_after(event), format_exit(event), last_step)


def _phase_after(event: events.RankExited | events.RanksExited) -> RankPhase:
    return RankPhase.STOPPED if event.stopped else RankPhase.FAILED if event.failed else RankPhase.EXITED


def _ranks_exited(status: RunStatus, event: events.RanksExited) -> RunStatus:
    return _with_ranks(status, event, _phase_after(event), format_exit(event))


def _ranks_hung(status: RunStatus, event: events.RanksHung) -> RunStatus:
    if event.unless_others_work:
        return status
    return _with_ranks(_with_hang(status, event), event, RankPhase.HUNG, "")


def _with_ranks(
    status: RunStatus, event: events.RanksExited | events.RanksHung, phase: RankPhase, detail: str
) -> RunStatus:
    """Update all known ranks of the event alike."""
    replica = _replica(status, event.replica)
    if event.attempt != replica.attempt:
        return status

    def end(known: dict[int, RankStatus]) -> None:
        for rank in from_ranges(event.ranks):
            if rank in known:
                known[rank] = replace(known[rank], phase=phase, detail=detail)

    return _with_replica(status, replace(replica, ranks=replica.ranks.updated(end)))


def _rank_hung(status: RunStatus, event: events.RankHung) -> RunStatus:
    if event.unless_others_work:  # it may wait for a rank that is busy
        return status
    where = f" in {event.top_frame}" if event.top_frame else ""
    detail = f"no step for {event.waited_s:.0f} s{where}"
    last_step = event.last_step if event.last_step >= 0 else None
    return _with_rank(_with_hang(status, event), event, RankPhase.HUNG, detail, last_step)


def _with_hang(status: RunStatus, event: events.RankHung | events.RanksHung) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt != replica.attempt:
        return status
    return _with_replica(status, replace(replica, hung_at=max(event.at, replica.hung_at or 0.0)))


def _with_rank(
    status: RunStatus, event: events.RankExited | events.RankHung, phase: RankPhase, detail: str, last_step: int | None
) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt != replica.attempt:
        return status

    def end(known: dict[int, RankStatus]) -> None:
        before = known.get(event.rank) or RankStatus(rank=event.rank, node=event.node)
        known[event.rank] = replace(before, phase=phase, detail=detail, last_step=last_step)

    return _with_replica(status, replace(replica, ranks=replica.ranks.updated(end)))


def _ranks_stopped(status: RunStatus, event: events.RanksStopped) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt != replica.attempt:
        return status
    return _with_replica(status, _ended(replica, {event.node}, RankPhase.STOPPED))


def _nodes_stopped(status: RunStatus, event: events.NodesStopped) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt != replica.attempt:
        return status
    return _with_replica(status, _ended(replica, set(from_ranges(event.nodes)), RankPhase.STOPPED))


def _ended(replica: ReplicaStatus, nodes: Set[int], phase: RankPhase) -> ReplicaStatus:
    """Mark all ranks still running on these nodes as ended."""
    over = (RankPhase.RUNNING, RankPhase.HUNG)

    def end(known: dict[int, RankStatus]) -> None:
        for rank, before in known.items():
            if before.node in nodes and before.phase in over:
                known[rank] = replace(before, phase=phase)

    return replace(replica, ranks=replica.ranks.updated(end))


def _is_same(finding: Finding, known: Finding) -> bool:
    """Whether both are the same finding, apart from the text about an injected fault."""
    alike = (finding.code, finding.evidence) == (known.code, known.evidence)
    return alike and known.what.startswith(finding.what)


def _recovery_decided(status: RunStatus, event: events.RecoveryDecided) -> RunStatus:
    replica, ledger = _replica(status, event.replica), status.ledger(event.replica)
    recovers = event.action != IGNORE_ACTION
    fault = fault_attribution.injected_cause(status.injected_faults, event)
    status = replace(
        _with_replica(status, replace(replica, recovering=recovers)),
        history=status.history.with_recovery(event, status.created_at, replica.step, fault),
        ledgers={
            **status.ledgers,
            event.replica: ledger.recovery_decided(event) if recovers else ledger.shutdown_decided(event.failed_at),
        },
    )
    finding = event.finding
    if event.action != STOP_ACTION:
        finding = replace(finding, severity=Severity.WARNING)
    status = _with_finding(status, finding, event)
    return replace(status, injected_faults=fault_attribution.unattributed_after(status.injected_faults, event))


def _fault_injected(status: RunStatus, event: events.FaultInjected) -> RunStatus:
    return replace(status, injected_faults=fault_attribution.unattributed_after(status.injected_faults, event))


def _probe_advanced(status: RunStatus, event: events.ProbeAdvanced) -> RunStatus:
    return _with_replica(status, replace(_replica(status, event.replica), probe_stage=STAGE_TEXT[event.stage]))


def _node_probed(status: RunStatus, event: events.NodeProbed) -> RunStatus:
    return _with_replica(status, replace(_replica(status, event.replica), probe_stage=""))


def _fabric_observed(status: RunStatus, event: events.FabricObserved) -> RunStatus:
    """A node's later report of a communicator replaces its earlier one."""
    from holdfast.diagnose.nccl_transport import judge  # 40 ms, which runs without NCCL need not spend

    replica, judgement = _replica(status, event.replica), judge(event)
    if event.attempt != replica.attempt or not judgement.line:
        return status
    seen = FabricStatus(
        line=judgement.line,
        severity=2 if judgement.other_network else 1 if judgement.finding else 0,
        node=event.node,
        communicator=event.communicator,
        size=event.size,
        nics=event.nics,
    )
    known = replica.fabric
    again = known is not None and (known.node, known.communicator) == (seen.node, seen.communicator)
    if known is not None and known.weight > seen.weight and not again:
        return status
    return _with_replica(status, replace(replica, fabric=seen))


def _sockets_observed(status: RunStatus, event: events.SocketsObserved) -> RunStatus:
    replica = _replica(status, event.replica)
    if event.attempt != replica.attempt:
        return status
    return _with_replica(status, replace(replica, sockets={**replica.sockets, event.node: event}))


def _step_times_compared(status: RunStatus, event: events.StepTimesCompared) -> RunStatus:
    replica = _replica(status, event.replica)
    return status if event.attempt != replica.attempt else _with_replica(status, replace(replica, step_times=event))


def _checkpoint_committed(status: RunStatus, event: events.CheckpointCommitted) -> RunStatus:
    found = CheckpointStatus(at=event.at, step=event.step, path=event.path, size_bytes=event.size_bytes)
    return replace(status, checkpoint=found)


def _replica(status: RunStatus, index: int) -> ReplicaStatus:
    return status.replicas.get(index) or ReplicaStatus(replica=index)


def _with_replica(status: RunStatus, replica: ReplicaStatus) -> RunStatus:
    return replace(status, replicas={**status.replicas, replica.replica: replica})


def _with_ledger(status: RunStatus, replica: int, ledger: ReplicaLedger) -> RunStatus:
    return replace(status, ledgers={**status.ledgers, replica: ledger})


_TABLE: dict[type[AnyEvent], Callable[[RunStatus, Any], RunStatus]] = {
    events.RunCreated: _created,
    events.CodeShipped: _code_shipped,
    events.ControllerStarted: _controller_started,
    events.CancelRequested: _cancel_requested,
    events.ShutdownDecided: _shutdown_decided,
    events.RunFinished: _finished,
    events.FindingRaised: _finding_raised,
    events.FaultInjected: _fault_injected,
    events.UpdateEnded: _update_ended,
    events.NodeRequested: _node_requested,
    events.StandbyReady: _standby_ready,
    events.MonitorsStarted: _monitors_started,
    events.StandbyPromoted: _standby_promoted,
    events.AgentConnected: _agent_connected,
    events.AgentDisconnected: _agent_disconnected,
    events.NodeTerminated: _node_terminated,
    events.NodeCreated: _node_created,
    events.NodeUnavailable: _node_unavailable,
    events.WorldSizeChanged: _world_size_changed,
    events.AttemptStarted: _attempt_started,
    events.RanksStarted: _ranks_started,
    events.RanksPrewarmed: _ranks_prewarmed,
    events.StepCommitted: _step_committed,
    events.RankExited: _rank_exited,
    events.RankHung: _rank_hung,
    events.RanksStopped: _ranks_stopped,
    events.NodesStarted: _nodes_started,
    events.NodesStopped: _nodes_stopped,
    events.RanksExited: _ranks_exited,
    events.RanksHung: _ranks_hung,
    events.RecoveryDecided: _recovery_decided,
    events.CheckpointCommitted: _checkpoint_committed,
    events.ProbeAdvanced: _probe_advanced,
    events.NodeProbed: _node_probed,
    events.FabricObserved: _fabric_observed,
    events.SocketsObserved: _sockets_observed,
    events.StepTimesCompared: _step_times_compared,
}
