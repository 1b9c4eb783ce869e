"""All decisions of a run: a pure function from (state, event) to (state, commands), with a handler table by event type.

The log holds the events that this machine received, so folding them gives back the state. Commands are then dropped,
except those that `ControllerStarted` and `AgentConnected` issue again. Clock, randomness and processes arrive as
events. The handlers are in node_handlers.py, rank_handlers.py, hangs.py, scale_up.py, fault_requests.py, rollout.py and
request_handlers.py; lifecycle.py has the consequences. policy.py decides what follows a failure, root_cause.py which
one came first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

from holdfast.control import (
    fault_requests,
    hangs,
    lifecycle,
    node_handlers,
    rank_handlers,
    request_handlers,
    rollout,
    scale_up,
)
from holdfast.control.state import NodeState, ReplicaState, State, Timer, Transition
from holdfast.events import (
    AgentConnected,
    AgentDisconnected,
    AnyEvent,
    CancelRequested,
    CheckpointCommitted,
    CheckpointRequested,
    CodeFetched,
    CodeShipped,
    ControllerStarted,
    FaultInjected,
    FaultRequested,
    NodeCreated,
    NodeEvicted,
    NodePreemptionNotice,
    NodesStopped,
    NodeTerminated,
    NodeUnavailable,
    ProfileRequested,
    RankExited,
    RankHung,
    RanksDrained,
    RanksExited,
    RanksHung,
    RanksStopped,
    RunCreated,
    RunEvent,
    RunFinished,
    StackDumpRequested,
    StandbyReady,
    StepCommitted,
    TimerExpired,
    UpdateRequested,
)
from holdfast.job.run_spec import CodeArchive
from holdfast.job.spec import Job


@dataclass(frozen=True)
class Machine:
    """The state machine of one job; stateless."""

    job: Job

    def step(self, state: State, event: AnyEvent) -> Transition:
        """Handle one event; events without a handler leave the state unchanged."""
        if state.finished:
            return state, ()
        if isinstance(event, RunCreated):
            return self._initial_state(event.at), ()
        handler = _HANDLERS.get(type(event))
        return handler(self.job, state, event) if handler else (state, ())

    def replay(self, events: Iterable[AnyEvent]) -> State:
        """The state after these events; commands are dropped."""
        state = State()
        for event in events:
            state, _ = self.step(state, event)
        return state

    @staticmethod
    def is_input(kind: type[AnyEvent]) -> bool:
        """Whether events of a type change the state."""
        return kind is RunCreated or kind in _HANDLERS

    @staticmethod
    def is_output(kind: type[AnyEvent]) -> bool:
        """Whether events of a type are the machine's decisions, logged as it makes them."""
        return kind in get_args(RunEvent) and not Machine.is_input(kind)

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
        whole = (1 << per_replica) - 1
        domains = (ReplicaState(replica=index, slots=whole << index * per_replica) for index in range(replicas))
        waits = {Timer.MIN_NODES.key(index): at + self.job.nodes.min_nodes_wait_s for index in range(replicas)}
        return State(nodes=nodes, replicas=tuple(domains), timers=waits)


def _timer_expired(job: Job, state: State, event: TimerExpired) -> Transition:
    if event.timer not in state.timers:
        return state, ()
    kind, index = Timer.parse(event.timer)
    return _TIMER_HANDLERS[kind](job, state.with_timer(event.timer, None), index, event.at)


def _code_shipped(job: Job, state: State, event: CodeShipped) -> Transition:
    code = CodeArchive(digest=event.digest, bytes=event.bytes, files=event.files, cwd=event.cwd)
    return replace(state, code=code), ()


def _run_finished(job: Job, state: State, event: RunFinished) -> Transition:
    return replace(state, finished=True, timers={}), ()


_HANDLERS: dict[type[AnyEvent], Callable[[Job, State, Any], Transition]] = {
    ControllerStarted: node_handlers.controller_started,
    AgentConnected: node_handlers.agent_connected,
    AgentDisconnected: node_handlers.agent_disconnected,
    NodeCreated: node_handlers.node_created,
    NodeUnavailable: node_handlers.node_unavailable,
    NodeEvicted: node_handlers.node_evicted,
    NodeTerminated: node_handlers.node_terminated,
    NodePreemptionNotice: node_handlers.node_preemption_notice,
    StandbyReady: node_handlers.standby_ready,
    RankExited: rank_handlers.rank_exited,
    RankHung: hangs.rank_hung,
    RanksDrained: rank_handlers.ranks_drained,
    RanksStopped: rank_handlers.ranks_stopped,
    NodesStopped: rank_handlers.nodes_stopped,
    RanksExited: rank_handlers.ranks_exited,
    RanksHung: rank_handlers.ranks_hung,
    StepCommitted: rank_handlers.step_committed,
    CancelRequested: request_handlers.cancel,
    CheckpointCommitted: scale_up.checkpoint_committed,
    FaultRequested: fault_requests.fault_requested,
    FaultInjected: fault_requests.fault_injected,
    CheckpointRequested: request_handlers.checkpoint,
    ProfileRequested: request_handlers.profile,
    StackDumpRequested: request_handlers.dump_stacks,
    UpdateRequested: rollout.update_requested,
    CodeFetched: rollout.code_fetched,
    CodeShipped: _code_shipped,
    TimerExpired: _timer_expired,
    RunFinished: _run_finished,
}

_TIMER_HANDLERS: dict[Timer, Callable[[Job, State, int, float], Transition]] = {
    Timer.RECONNECT: node_handlers.on_reconnect_timeout,
    Timer.STOP: node_handlers.on_stop_timeout,
    Timer.HANG_VERDICT: hangs.on_hang_verdict,
    Timer.FIRST_STEP: hangs.on_first_step_timeout,
    Timer.JOIN: node_handlers.on_join_timeout,
    Timer.STANDBY_JOIN: node_handlers.on_standby_join_timeout,
    Timer.MIN_NODES: lifecycle.on_min_nodes_timeout,
    Timer.BACK_OFF: lifecycle.advance,
    Timer.SCALE_UP: scale_up.maybe_scale_up,
    Timer.EXIT: scale_up.on_exit_timeout,
    Timer.UPDATE: rollout.on_update_timeout,
}
