"""One sentence for each kind of event, and the filter for events worth a line during a run.

A long file, because it is one table with its phrases.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from holdfast.events import (
    AgentConnected,
    AgentDisconnected,
    AnyEvent,
    AttemptStarted,
    CancelRequested,
    CheckpointCommitted,
    CheckpointRequested,
    CodeFetched,
    CodeShipped,
    ControllerStarted,
    FaultInjected,
    FaultRequested,
    FindingRaised,
    NodeCreated,
    NodeEvicted,
    NodePreemptionNotice,
    NodeRequested,
    NodesStarted,
    NodesStopped,
    NodeTerminated,
    NodeUnavailable,
    ProfileRequested,
    RankExited,
    RankHung,
    RanksDrained,
    RanksExited,
    RanksHung,
    RanksPrewarmed,
    RanksStarted,
    RanksStopped,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    ShutdownDecided,
    StackDumpRequested,
    StacksDumped,
    StandbyPromoted,
    StandbyReady,
    StepCommitted,
    TimerExpired,
    UpdateEnded,
    UpdateRequested,
    WorldSizeChanged,
)
from holdfast.findings import replica_suffix
from holdfast.metrics.metric_text import BREAKDOWN, UTILISATION, format_metrics, format_number
from holdfast.report.formatting import count, duration, format_numbers, format_ranges, sanitize, short_digest
from holdfast.report.run_summary import format_maybe_recomputed
from holdfast.report.status_reducer import format_exit
from holdfast.report.world_size_text import format_world_size

STEP_LINE_EVERY_S = 1.0
"""Minimum time, by event timestamps, between two per-step lines of the same kind."""


def describe(event: AnyEvent) -> str:
    """One line that describes an event."""
    return sanitize(_DESCRIPTIONS[type(event)](event))


def event_line(event: AnyEvent) -> str:
    """The description, prefixed with the local time of day."""
    moment = time.strftime("%H:%M:%S", time.localtime(event.at))
    return f"{moment}.{int(event.at % 1 * 1000):03} {describe(event)}"


class EventLineFilter:
    """Selects the events to print while following a run; at most about one step and checkpoint line per second."""

    def __init__(self) -> None:
        self._last: dict[type[AnyEvent], float] = {}
        self._steps: dict[int, int] = {}
        """The last step of each replica."""
        self._pending_step: StepCommitted | None = None
        """The last step, if it has not been printed."""
        self._pending_checkpoint: CheckpointCommitted | None = None
        """A checkpoint that is complete on its node before the other nodes reported its step."""

    def lines_for(self, event: AnyEvent) -> list[str]:
        """The lines to print now: none, the event's, or the event's and those held back."""
        match event:
            case StepCommitted():
                self._steps[event.replica] = event.step
                due = self._due(event)
                self._pending_step = None if due else event
                return [*([event_line(event)] if due else []), *self._checkpoint()]
            case CheckpointCommitted():
                if self._due(event):
                    self._pending_checkpoint = event
                return self._checkpoint()
            case _ if _is_notable(event):
                held, self._pending_step = self._pending_step, None
                early, self._pending_checkpoint = self._pending_checkpoint, None
                return [event_line(each) for each in (held, early, event) if each is not None]
            case _:
                return []

    def _checkpoint(self) -> list[str]:
        """A checkpoint is printed after its step."""
        early = self._pending_checkpoint
        if early is None or self._steps.get(early.replica, -1) < early.step:
            return []
        self._pending_checkpoint = None
        step = self._pending_step
        if step is None or (step.replica, step.step) != (early.replica, early.step):
            return [event_line(early)]
        self._pending_step = None
        return [event_line(step), event_line(early)]

    def _due(self, event: StepCommitted | CheckpointCommitted) -> bool:
        last = self._last.get(type(event))
        due = last is None or not 0 <= event.at - last < STEP_LINE_EVERY_S
        if due:
            self._last[type(event)] = event.at
        return due


_QUIET = (
    ControllerStarted,
    RanksStarted,
    RanksPrewarmed,
    StacksDumped,
    CodeFetched,
    RanksStopped,
    NodesStarted,
    NodesStopped,
    NodeCreated,
    AgentDisconnected,
    TimerExpired,
)
"""Internal events that are not printed while following a run."""


def _is_notable(event: AnyEvent) -> bool:
    if isinstance(event, RankExited | RanksExited):
        return not event.stopped and format_exit(event) != "exited with code 0"
    return not isinstance(event, _QUIET)


def _created(event: RunCreated) -> str:
    return f"run {event.run} created"


def _code_shipped(event: CodeShipped) -> str:
    return f"code {short_digest(event.digest)} shipped: {count(event.files, 'file')}, {event.bytes:,} bytes"


def _controller_started(event: ControllerStarted) -> str:
    return f"a controller (process {event.pid}) took the run over"


def _attempt_started(event: AttemptStarted) -> str:
    ranks = count(event.world_size, "rank")
    where = f", meeting at {event.master_addr}:{event.master_port}" if event.master_addr else ""
    code = f", with code {short_digest(event.code_digest)}" if event.code_digest else ""
    return f"attempt {event.attempt}{replica_suffix(event.replica)}: {ranks} starting{where}{code}"


def _step_committed(event: StepCommitted) -> str:
    figures = [f"loss {format_number(event.metrics['loss'])}"] if "loss" in event.metrics else []
    each_s = (event.ended - event.started) / event.steps
    if event.metrics.get("tokens") and each_s > 0:
        figures.append(f"{event.metrics['tokens'] / each_s:,.0f} tokens/s")
    figures += format_metrics(event.metrics, UTILISATION + BREAKDOWN)
    which = f"step {event.step}" if event.steps == 1 else f"steps {event.first}-{event.step}"
    took = f"{duration(each_s)}{'' if event.steps == 1 else ' each'}"
    return ", ".join([f"{which}{replica_suffix(event.replica)} committed in {took}", *figures])


def _recovery_decided(event: RecoveryDecided) -> str:
    again = f"; {format_maybe_recomputed(event.recomputed_s)}" if event.recomputed_s else ""
    return f"{event.finding.what}  [{event.finding.code}]; decision: {event.action}{again}"


def _node_requested(event: NodeRequested) -> str:
    because = f": {event.reason}" if event.reason else ""
    as_standby = " as a standby" if event.standby else ""
    return f"node{event.node}.{event.generation} requested{as_standby}{because}"


def _standby_promoted(event: StandbyPromoted) -> str:
    return f"node{event.node}, a standby, takes the place of node{event.replaces}{replica_suffix(event.replica)}"


def _standby_ready(event: StandbyReady) -> str:
    return f"node{event.node} is ready to take the place of another"


def _node_created(event: NodeCreated) -> str:
    return f"node{event.node}.{event.generation} created; waiting for its agent"


def _node_unavailable(event: NodeUnavailable) -> str:
    return f"node{event.node}.{event.generation} is unavailable: {event.reason}"


def _world_size_changed(event: WorldSizeChanged) -> str:
    return f"{format_world_size(event)}{replica_suffix(event.replica)}"


def _shutdown_decided(event: ShutdownDecided) -> str:
    # The finding's text is in the decision, one line above.
    because = "" if event.finding else f": {event.reason}"
    return f"the run is coming to its end, {event.outcome}{because}"


def _finished(event: RunFinished) -> str:
    return f"run {event.outcome} (exit code {event.exit_code})"


def _timer_expired(event: TimerExpired) -> str:
    return f"deadline {event.timer} passed"


def _node_evicted(event: NodeEvicted) -> str:
    return f"the queue evicted node{event.node}.{event.generation}: {event.reason}"


def _node_terminated(event: NodeTerminated) -> str:
    return f"node{event.node}.{event.generation} is gone: {event.reason}"


def _node_preemption_notice(event: NodePreemptionNotice) -> str:
    return f"node{event.node} is to be taken away: its ranks have {duration(event.grace_s)} to save and end"


def _ranks_drained(event: RanksDrained) -> str:
    attempt = f"attempt {event.attempt}{replica_suffix(event.replica)}"
    return f"ranks on node{event.node} have taken their last step of {attempt}"


def _agent_disconnected(event: AgentDisconnected) -> str:
    return f"lost touch with node{event.node}.{event.generation}"


def _finding_raised(event: FindingRaised) -> str:
    return f"{event.finding.severity}: {event.finding.what}  [{event.finding.code}]"


def _agent_connected(event: AgentConnected) -> str:
    alive = f"; ranks {format_numbers([state.rank for state in event.running])} are alive" if event.running else ""
    return f"node{event.node}.{event.generation} joined ({event.hostname}, {event.address}){alive}"


def _ranks_started(event: RanksStarted) -> str:
    ranks = format_numbers([state.rank for state in event.ranks])
    warm = [state.rank for state in event.ranks if state.prewarmed]
    how = f", {'all' if len(warm) == len(event.ranks) else format_numbers(warm)} of them prewarmed" if warm else ""
    return f"node{event.node} started ranks {ranks} of attempt {event.attempt}{replica_suffix(event.replica)}{how}"


def _ranks_prewarmed(event: RanksPrewarmed) -> str:
    return f"node{event.node} has the imports done for the next start of ranks {format_numbers(list(event.ranks))}"


def _rank_exited(event: RankExited) -> str:
    stopped = " (stopped by holdfast)" if event.stopped else ""
    error = f": {event.error}" if event.error and not event.stopped else ""
    return f"rank {event.rank}{replica_suffix(event.replica)} on node{event.node} {format_exit(event)}{stopped}{error}"


def _ranks_stopped(event: RanksStopped) -> str:
    return f"no rank of attempt {event.attempt}{replica_suffix(event.replica)} is left on node{event.node}"


def _nodes_started(event: NodesStarted) -> str:
    nodes, ranks = format_ranges(event.nodes), format_ranges(event.ranks)
    return f"nodes {nodes} started ranks {ranks} of attempt {event.attempt}{replica_suffix(event.replica)}"


def _nodes_stopped(event: NodesStopped) -> str:
    attempt = f"attempt {event.attempt}{replica_suffix(event.replica)}"
    return f"no rank of {attempt} is left on nodes {format_ranges(event.nodes)}"


def _ranks_exited(event: RanksExited) -> str:
    stopped = " (stopped by holdfast)" if event.stopped else ""
    return f"ranks {format_ranges(event.ranks)}{replica_suffix(event.replica)} {format_exit(event)}{stopped}"


def _ranks_hung(event: RanksHung) -> str:
    return f"ranks {format_ranges(event.ranks)}{replica_suffix(event.replica)} have passed no step either"


def _rank_hung(event: RankHung) -> str:
    where = f" in {event.top_frame}" if event.top_frame else ""
    after = f", after step {event.last_step}" if event.last_step >= 0 else ""
    who = f"rank {event.rank}{replica_suffix(event.replica)} on node{event.node}"
    return f"{who} has passed no step for {duration(event.waited_s)}{where}{after}"


def _checkpoint_committed(event: CheckpointCommitted) -> str:
    return f"checkpoint of step {event.step}{replica_suffix(event.replica)} complete: {event.path}"


def _fault_injected(event: FaultInjected) -> str:
    after = f" after step {event.step}" if event.step >= 0 else ""
    where = f" on node{event.node}" if event.node >= 0 else ""
    return f"fault injected: {event.action} {event.target}{where}{after}"


def _cancel_requested(event: CancelRequested) -> str:
    who = f" by {event.requested_by}" if event.requested_by else ""
    return f"{'forced shutdown' if event.force else 'shutdown'} requested{who}"


def _fault_requested(event: FaultRequested) -> str:
    which = f" {event.index}" if event.target.is_numbered else ""
    when = f" after step {event.at_step}" if event.at_step is not None else ""
    span = f" for {duration(event.for_s)}" if event.for_s is not None else ""
    much = f" by {event.amount:g}" if event.amount is not None else ""
    return f"fault requested: {event.action} {event.target}{which}{much}{when}{span}"


def _checkpoint_requested(event: CheckpointRequested) -> str:
    return "checkpoint requested"


def _profile_requested(event: ProfileRequested) -> str:
    return "step profile requested"


def _stack_dump_requested(event: StackDumpRequested) -> str:
    return "stack dump of all ranks requested"


def _stacks_dumped(event: StacksDumped) -> str:
    at = f"is in {event.top_frame}" if event.top_frame else "gave no stacks"
    return f"rank {event.rank}{replica_suffix(event.replica)} on node{event.node} {at}"


def _update_requested(event: UpdateRequested) -> str:
    what = (
        f": {short_digest(event.previous_digest)} -> {short_digest(event.digest)}"
        if event.digest
        else " to the code now in place"
    )
    when = {0.0: "immediately", None: "at the next restart"}.get(event.after_s)
    return f"code update requested{what}, {when or f'at the next restart or in {duration(event.after_s or 0.0)}'}"


def _code_fetched(event: CodeFetched) -> str:
    problem = f" cannot have code {short_digest(event.digest)}: {event.failure.what}" if event.failure else ""
    return f"node{event.node}{problem or f' has code {short_digest(event.digest)}, for a later start'}"


def _update_ended(event: UpdateEnded) -> str:
    because = f": {event.finding.what}" if event.finding else ""
    which = (
        f"{short_digest(event.previous_digest)} -> {short_digest(event.digest)}"
        if event.digest
        else "of the code in place"
    )
    return f"the update {which} was {event.outcome} after step {event.step}{because}"


_DESCRIPTIONS: dict[type[AnyEvent], Callable[[Any], str]] = {
    RunCreated: _created,
    CodeShipped: _code_shipped,
    ControllerStarted: _controller_started,
    AttemptStarted: _attempt_started,
    StepCommitted: _step_committed,
    RecoveryDecided: _recovery_decided,
    NodeRequested: _node_requested,
    StandbyPromoted: _standby_promoted,
    StandbyReady: _standby_ready,
    ShutdownDecided: _shutdown_decided,
    RunFinished: _finished,
    TimerExpired: _timer_expired,
    NodeEvicted: _node_evicted,
    NodeTerminated: _node_terminated,
    NodePreemptionNotice: _node_preemption_notice,
    RanksDrained: _ranks_drained,
    NodeCreated: _node_created,
    NodeUnavailable: _node_unavailable,
    WorldSizeChanged: _world_size_changed,
    AgentDisconnected: _agent_disconnected,
    FindingRaised: _finding_raised,
    AgentConnected: _agent_connected,
    RanksStarted: _ranks_started,
    RanksPrewarmed: _ranks_prewarmed,
    RankExited: _rank_exited,
    RanksStopped: _ranks_stopped,
    RankHung: _rank_hung,
    NodesStarted: _nodes_started,
    NodesStopped: _nodes_stopped,
    RanksExited: _ranks_exited,
    RanksHung: _ranks_hung,
    CheckpointCommitted: _checkpoint_committed,
    FaultInjected: _fault_injected,
    CancelRequested: _cancel_requested,
    FaultRequested: _fault_requested,
    CheckpointRequested: _checkpoint_requested,
    ProfileRequested: _profile_requested,
    StackDumpRequested: _stack_dump_requested,
    StacksDumped: _stacks_dumped,
    UpdateRequested: _update_requested,
    CodeFetched: _code_fetched,
    UpdateEnded: _update_ended,
}
