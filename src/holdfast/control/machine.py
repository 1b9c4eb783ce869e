"""All decisions of a run: a pure function from (state, event) to (state, commands), with one table of handlers.

The log holds the events that this machine received, so folding them gives back the state. Commands are then dropped,
except those that `ControllerStarted` and `AgentConnected` issue again. Clock, randomness and processes arrive as
events. An event finds its handler by its type and the phase of its replica. A handler changes a `Context`; what else
follows from the event is handled next, found in the same way, until nothing follows. policy.py decides what follows a
failure, root_cause.py which one came first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, get_args

from msgspec import Struct

from holdfast import events
from holdfast.control import (
    elastic,
    fabric_handler,
    hangs,
    lifecycle,
    node_checks,
    node_handlers,
    node_slots,
    rank_handlers,
    replay_handlers,
    requests,
    rollout,
    watch_handlers,
)
from holdfast.control.commands import Commands
from holdfast.control.context import Context, FollowUp
from holdfast.control.node_set import NodeSet
from holdfast.control.notices import announce_changes
from holdfast.control.state import NodeState, ReplicaPhase, ReplicaState, State, Timer
from holdfast.job.spec import Job

Trigger = type[events.AnyEvent] | Timer | FollowUp
Phases = tuple[ReplicaPhase | None, ...]
Handler = Callable[[Context, Any], None]
"""Takes the event, or the replica or node of an expired timer or a follow-up."""

_GATHERING, _RUNNING, _HANG_SUSPECTED, _STOPPING, _DONE = ReplicaPhase
_AT_WORK: Phases = (_RUNNING, _HANG_SUSPECTED)
_NOT_AT_WORK: Phases = (_GATHERING, _STOPPING, _DONE)
_ANY: Phases = tuple(ReplicaPhase)
_STANDBY: Phases = (None,)

RUN_HANDLERS: dict[Trigger, Handler] = {
    events.ControllerStarted: node_handlers.controller_started,
    events.CancelRequested: lifecycle.cancel_requested,
    events.CheckpointRequested: requests.checkpoint_requested,
    events.ProfileRequested: requests.profile_requested,
    events.StackDumpRequested: requests.stack_dump_requested,
    events.FaultRequested: requests.fault_requested,
    events.FaultInjected: requests.fault_injected,
    events.CodeShipped: rollout.code_shipped,
    events.UpdateRequested: rollout.update_requested,
    events.CodeFetched: rollout.code_fetched,
    Timer.UPDATE: rollout.update_timed_out,
    events.RunFinished: lifecycle.run_finished,
}
"""Of events that concern the whole run."""

NODE_HANDLERS: dict[Trigger, dict[Phases, Handler]] = {
    events.AgentConnected: {
        _AT_WORK: node_handlers.agent_connected_to_attempt,
        _NOT_AT_WORK: node_handlers.agent_connected,
        _STANDBY: node_handlers.standby_connected,
    },
    events.AgentDisconnected: {_ANY + _STANDBY: node_handlers.agent_disconnected},
    events.NodeCreated: {_ANY + _STANDBY: node_handlers.node_created},
    events.NodeUnavailable: {_ANY + _STANDBY: node_handlers.node_unavailable},
    events.NodeEvicted: {_ANY + _STANDBY: node_handlers.node_evicted},
    events.NodeTerminated: {_ANY + _STANDBY: node_handlers.node_terminated},
    events.NodePreemptionNotice: {
        _AT_WORK: node_handlers.node_preempted,
        _NOT_AT_WORK + _STANDBY: node_handlers.node_leaving,
    },
    events.StandbyReady: {_STANDBY: node_handlers.standby_ready},
    events.NodeChecked: {_ANY + _STANDBY: node_checks.node_checked},
    events.NodeProbed: {_ANY + _STANDBY: node_checks.node_probed},
    events.NodeReplayed: {_ANY + _STANDBY: replay_handlers.node_replayed},
    events.DeviceFaultObserved: {_ANY + _STANDBY: watch_handlers.device_fault_observed},
    events.TrafficStopped: {_AT_WORK: watch_handlers.traffic_stopped},
    Timer.CHECK: {_ANY + _STANDBY: node_checks.check_timed_out},
    Timer.RECONNECT: {_ANY + _STANDBY: node_handlers.reconnect_timed_out},
    Timer.STANDBY_JOIN: {_STANDBY: node_handlers.standby_join_timed_out},
    FollowUp.LOSE_FAILED: {_ANY + _STANDBY: node_checks.lose_failed},
    FollowUp.REFILL: {_ANY + _STANDBY: node_slots.refill_slot},
}
"""Of events of one node, by the phase of its replica; a standby has none."""

REPLICA_HANDLERS: dict[Trigger, dict[Phases, Handler]] = {
    events.RankExited: {_AT_WORK: rank_handlers.rank_exited, (_STOPPING,): rank_handlers.rank_exited_in_stop},
    events.RanksExited: {
        (_HANG_SUSPECTED,): rank_handlers.ranks_exited_in_hang,
        (_RUNNING, _STOPPING, _DONE): rank_handlers.ranks_exited,
    },
    events.RankHung: {_AT_WORK: hangs.rank_hung},
    events.RanksHung: {(_HANG_SUSPECTED,): rank_handlers.ranks_hung, (_RUNNING,): hangs.ranks_silent},
    events.RanksDrained: {(_STOPPING,): rank_handlers.ranks_drained},
    events.RanksStopped: {_ANY: rank_handlers.ranks_stopped},
    events.NodesStopped: {_ANY: rank_handlers.nodes_stopped},
    events.NumericFaultObserved: {(*_AT_WORK, _STOPPING): watch_handlers.numeric_fault_observed},
    events.CorruptionObserved: {(*_AT_WORK, _STOPPING): watch_handlers.corruption_observed},
    events.StragglerObserved: {(_RUNNING,): watch_handlers.straggler_observed},
    events.StepCommitted: {_ANY: rank_handlers.step_committed},
    events.FabricObserved: {_AT_WORK: fabric_handler.fabric_observed},
    events.SocketsObserved: {_AT_WORK: fabric_handler.sockets_observed},
    events.LinksMeasured: {_AT_WORK: fabric_handler.links_measured},
    events.LinkSlowed: {_AT_WORK: fabric_handler.connection_slowed},
    events.CheckpointCommitted: {_AT_WORK: elastic.checkpoint_committed},
    Timer.PROBE: {_ANY: node_checks.probe_timed_out},
    Timer.REPLAY: {_ANY: replay_handlers.replay_timed_out},
    Timer.MIN_NODES: {(_GATHERING, _STOPPING): lifecycle.min_nodes_timed_out},
    Timer.JOIN: {(_GATHERING, _RUNNING, _HANG_SUSPECTED, _STOPPING): node_handlers.join_timed_out},
    Timer.BACK_OFF: {(_GATHERING,): lifecycle.start_attempt},
    Timer.FIRST_STEP: {(_RUNNING,): hangs.request_reports},
    Timer.HANG_VERDICT: {(_HANG_SUSPECTED,): hangs.hang_verdict_due},
    Timer.STOP: {(_STOPPING,): node_handlers.stop_timed_out},
    Timer.SCALE_UP: {(_RUNNING,): elastic.scale_up},
    Timer.EXIT: {_AT_WORK: elastic.exit_timed_out},
    FollowUp.ADVANCE: {
        (_GATHERING,): lifecycle.start_attempt,
        (_RUNNING, _HANG_SUSPECTED, _STOPPING): lifecycle.judge_attempt,
    },
    FollowUp.STOP: {
        (_GATHERING, _RUNNING, _HANG_SUSPECTED): lifecycle.stop_replica,
        (_STOPPING,): lifecycle.judge_attempt,
    },
    FollowUp.PROBED: {_ANY: node_checks.judge_probe},
    FollowUp.REPLAYED: {_ANY: replay_handlers.judge_replay},
    FollowUp.SCALE_UP: {(_RUNNING,): elastic.scale_up},
    FollowUp.RESUME: {
        (_HANG_SUSPECTED,): hangs.await_reports_again,
        (_STOPPING,): lifecycle.stop_again,
        (_GATHERING, _RUNNING, _DONE): node_handlers.wait_again,
    },
    FollowUp.END: {
        (_GATHERING,): lifecycle.finish_replica,
        _AT_WORK: lifecycle.stop_replica,
        (_STOPPING,): lifecycle.stop_running_nodes,
    },
    FollowUp.FINISH: {_ANY: lifecycle.finish_replica},
}
"""Of events of one replica, by its phase; those of an earlier attempt are ignored, except steps."""

_BY_PHASE: dict[Trigger, dict[ReplicaPhase | None, Handler]] = {
    trigger: {phase: handler for phases, handler in rows.items() for phase in phases}
    for trigger, rows in (NODE_HANDLERS | REPLICA_HANDLERS).items()
}
_LAST = (FollowUp.REFILL, FollowUp.SCALE_UP)
"""Handled when nothing else follows: one event may cost several nodes, and the last of them may end the run."""

_ATTEMPT_EVENTS = frozenset(
    trigger for trigger in REPLICA_HANDLERS if isinstance(trigger, type) and trigger is not events.StepCommitted
)


class Machine(Struct, frozen=True):
    """The state machine of one job; stateless."""

    job: Job

    def step(self, state: State, event: events.AnyEvent) -> tuple[State, Commands]:
        """Handle one event and all that follows; events without a handler leave the state unchanged."""
        if state.finished:
            return state, ()
        if isinstance(event, events.RunCreated):
            return self._initial_state(event.at), ()
        ctx = Context(job=self.job, state=state, at=event.at)
        pending: list[tuple[Trigger, Any]] = [_trigger_of(ctx, event)]
        last = deque[tuple[Trigger, Any]]()
        while pending or last:
            trigger, subject = pending.pop() if pending else last.popleft()
            before = ctx.state
            if handler := _find_handler(before, trigger, subject):
                handler(ctx, subject)
                announce_changes(ctx, before)
                last.extend(each for each in ctx.raised if each[0] in _LAST)
                pending.extend(each for each in reversed(ctx.raised) if each[0] not in _LAST)
                ctx.raised.clear()
        return ctx.state, tuple(ctx.commands)

    def replay(self, log: Iterable[events.AnyEvent]) -> State:
        """The state after these events; commands are dropped."""
        state = State()
        for event in log:
            state, _ = self.step(state, event)
        return state

    @staticmethod
    def is_input(kind: type[events.AnyEvent]) -> bool:
        """Whether events of a type change the state."""
        return kind in (events.RunCreated, events.TimerExpired) or kind in RUN_HANDLERS or kind in _BY_PHASE

    @staticmethod
    def is_output(kind: type[events.AnyEvent]) -> bool:
        """Whether events of a type are the machine's decisions, logged as it makes them."""
        return kind in get_args(events.RunEvent) and not Machine.is_input(kind)

    def _initial_state(self, at: float) -> State:
        """The state in which every run begins: no node exists, and none was requested."""
        replicas = self.job.recovery.replicas
        per_replica = self.job.nodes.max // replicas
        nodes = tuple(
            NodeState(
                node=slot, node_rank=slot, since=at, replica=slot // per_replica if slot < self.job.nodes.max else None
            )
            for slot in range(self.job.node_slots)
        )
        domains = (
            ReplicaState(replica=index, slots=NodeSet.span(index * per_replica, per_replica))
            for index in range(replicas)
        )
        waits = {Timer.MIN_NODES.key(index): at + self.job.nodes.min_nodes_wait_s for index in range(replicas)}
        return State(nodes=nodes, replicas=tuple(domains), timers=waits)


def _trigger_of(ctx: Context, event: events.AnyEvent) -> tuple[Trigger, Any]:
    """What an event is looked up as, and what its handler takes; an expired timer is deleted."""
    if not isinstance(event, events.TimerExpired):
        return type(event), event
    if event.timer not in ctx.state.timers:
        return events.TimerExpired, event
    timer, index = Timer.parse(event.timer)
    ctx.clear_timers(index, timer)
    return timer, index


def _find_handler(state: State, trigger: Trigger, subject: Any) -> Handler | None:
    """The handler for an event; None if it is of an earlier attempt or generation, or changes nothing in this phase."""
    if handler := RUN_HANDLERS.get(trigger):
        return handler
    by_phase = _BY_PHASE.get(trigger)
    if by_phase is None:
        return None
    if trigger in NODE_HANDLERS:
        index: int = getattr(subject, "node", subject)
        node = state.nodes[index]
        current = getattr(subject, "generation", node.generation) == node.generation
        phase = None if node.replica is None else state.replicas[node.replica].phase
    else:
        index = getattr(subject, "replica", subject)
        replica = state.replicas[index]
        current = trigger not in _ATTEMPT_EVENTS or subject.attempt == replica.attempt
        phase = replica.phase
    return by_phase.get(phase) if current else None
