"""Owns every decision of a run: a pure function from (state, event) to (state, commands), over a table by event type.

The log holds the events this machine was fed, so folding the log through it gives back the state; commands are then
dropped, except those that `ControllerStarted` and `AgentJoined` ask for again. Clock, randomness and processes come in
as events. The rows are in nodes.py, ranks.py, hangs.py, growth.py, drills.py, updates.py and requests.py, and what
follows from them in course.py. Policy (policy.py) says what a failure deserves; blame (blame.py) which one came first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

from holdfast.control import course, drills, growth, hangs, nodes, ranks, requests, updates
from holdfast.control.state import Deadline, NodeState, ReplicaState, State, Transition
from holdfast.events import (
    AgentJoined,
    AgentLeft,
    AnyEvent,
    CancelRequested,
    CheckpointCommitted,
    CheckpointRequested,
    CodeFetched,
    CodeShipped,
    ControllerStarted,
    DeadlinePassed,
    DrillDone,
    DrillRequested,
    NodeEvicted,
    NodeGone,
    NodeLeaving,
    NodeMade,
    NodesStopped,
    NodeUnavailable,
    RankExited,
    RankHung,
    RanksExited,
    RanksHung,
    RanksLeaving,
    RanksStopped,
    RunCreated,
    RunEvent,
    RunFinished,
    SplitRequested,
    StacksRequested,
    StandbyReady,
    StepCommitted,
    UpdateRequested,
)
from holdfast.job.accepted import Shipped
from holdfast.job.spec import Job


@dataclass(frozen=True)
class Machine:
    """The machine for one job; holds no state of its own."""

    job: Job

    def step(self, state: State, event: AnyEvent) -> Transition:
        """Take one event; events that carry no decision leave the state as it is."""
        if state.finished:
            return state, ()
        if isinstance(event, RunCreated):
            return self._first(event.at), ()
        handler = _TABLE.get(type(event))
        return handler(self.job, state, event) if handler else (state, ())

    def replay(self, events: Iterable[AnyEvent]) -> State:
        """The state after these events, with nothing done about them."""
        state = State()
        for event in events:
            state, _ = self.step(state, event)
        return state

    @staticmethod
    def takes(kind: type[AnyEvent]) -> bool:
        """Whether events of a kind move the state."""
        return kind is RunCreated or kind in _TABLE

    @staticmethod
    def decides(kind: type[AnyEvent]) -> bool:
        """Whether events of a kind are the machine's own, written down as it decides them."""
        return kind in get_args(RunEvent) and not Machine.takes(kind)

    def _first(self, at: float) -> State:
        """The state in which every run begins: no node is there, and none was asked for."""
        replicas = self.job.recovery.replicas
        per_replica = self.job.nodes.max // replicas
        nodes = tuple(
            NodeState(
                node=slot, seat=slot, since=at, replica=slot // per_replica if slot < self.job.nodes.max else None
            )
            for slot in range(self.job.node_slots)
        )
        whole = (1 << per_replica) - 1
        domains = (ReplicaState(replica=index, slots=whole << index * per_replica) for index in range(replicas))
        waits = {Deadline.WAIT.of(index): at + self.job.nodes.wait_s for index in range(replicas)}
        return State(nodes=nodes, replicas=tuple(domains), deadlines=waits)


def _deadline_passed(job: Job, state: State, event: DeadlinePassed) -> Transition:
    if event.deadline not in state.deadlines:
        return state, ()
    kind, index = Deadline.read(event.deadline)
    return _DEADLINES[kind](job, state.with_deadline(event.deadline, None), index, event.at)


def _shipped(job: Job, state: State, event: CodeShipped) -> Transition:
    code = Shipped(digest=event.digest, bytes=event.bytes, files=event.files, cwd=event.cwd)
    return replace(state, code=code), ()


def _finished(job: Job, state: State, event: RunFinished) -> Transition:
    return replace(state, finished=True, deadlines={}), ()


_TABLE: dict[type[AnyEvent], Callable[[Job, State, Any], Transition]] = {
    ControllerStarted: nodes.controller_started,
    AgentJoined: nodes.agent_joined,
    AgentLeft: nodes.agent_left,
    NodeMade: nodes.node_made,
    NodeUnavailable: nodes.node_unavailable,
    NodeEvicted: nodes.node_evicted,
    NodeGone: nodes.node_gone,
    NodeLeaving: nodes.node_leaving,
    StandbyReady: nodes.standby_ready,
    RankExited: ranks.rank_exited,
    RankHung: hangs.rank_hung,
    RanksLeaving: ranks.ranks_leaving,
    RanksStopped: ranks.ranks_stopped,
    NodesStopped: ranks.nodes_stopped,
    RanksExited: ranks.ranks_exited,
    RanksHung: ranks.ranks_hung,
    StepCommitted: ranks.step_committed,
    CancelRequested: requests.cancel,
    CheckpointCommitted: growth.checkpoint_committed,
    DrillRequested: drills.requested,
    DrillDone: drills.done,
    CheckpointRequested: requests.checkpoint,
    SplitRequested: requests.split,
    StacksRequested: requests.stacks,
    UpdateRequested: updates.requested,
    CodeFetched: updates.fetched,
    CodeShipped: _shipped,
    DeadlinePassed: _deadline_passed,
    RunFinished: _finished,
}

_DEADLINES: dict[Deadline, Callable[[Job, State, int, float], Transition]] = {
    Deadline.AWAY: nodes.out_of_reach,
    Deadline.STOP: nodes.stubborn,
    Deadline.JUDGE: hangs.judged,
    Deadline.BEGIN: hangs.not_begun,
    Deadline.JOIN: nodes.not_joined,
    Deadline.STANDBY: nodes.standby_not_joined,
    Deadline.WAIT: course.waited,
    Deadline.BACK_OFF: course.proceed,
    Deadline.GROW: growth.consider,
    Deadline.LEAVE: growth.not_left,
    Deadline.UPDATE: updates.is_due,
}
