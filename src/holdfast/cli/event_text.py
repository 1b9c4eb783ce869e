"""One sentence for each type of event, and the filter for events worth a line during a run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from holdfast import events
from holdfast.diagnose.stack_groups import describe_origin
from holdfast.diagnose.tcp_pairs import format_rate
from holdfast.events import AnyEvent, CheckpointCommitted, FaultAction, FaultTarget, StepCommitted
from holdfast.events.probe_results import STAGE_TEXT
from holdfast.findings import CheckOutcome, replica_suffix
from holdfast.metrics.metric_text import BREAKDOWN, UTILISATION, format_metrics, format_number
from holdfast.report.formatting import count, duration, format_numbers, format_ranges, sanitize, short_digest
from holdfast.report.run_summary import format_maybe_recomputed
from holdfast.report.status_reducer import format_exit
from holdfast.report.world_size_text import format_world_size

STEP_LINE_EVERY_S = 1.0
"""Minimum time, by event timestamps, between two per-step lines of the same kind."""


def describe(event: AnyEvent) -> str:
    """One line that describes an event."""
    return sanitize(_SENTENCES[type(event)](event))


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
    events.ControllerStarted,
    events.RanksStarted,
    events.RanksPrewarmed,
    events.StacksDumped,
    events.EvidenceKept,
    events.TraceKept,
    events.CodeFetched,
    events.RanksStopped,
    events.NodesStarted,
    events.NodesStopped,
    events.NodeCreated,
    events.AgentDisconnected,
    events.TimerExpired,
    events.SocketsObserved,
    events.LinksMeasured,
    events.LinkSlowed,
    events.MonitorsStarted,
    events.TrafficStopped,
    events.StepTimesCompared,
)
"""Internal events that are not printed while following a run."""


def _is_notable(event: AnyEvent) -> bool:
    if isinstance(event, events.RankExited | events.RanksExited):
        return not event.stopped and format_exit(event) != "exited with code 0"
    if isinstance(event, events.NodeProbed):
        return bool(event.result or event.problem or event.not_looked_at)
    if isinstance(event, events.NodeReplayed):
        return bool(event.problem)
    return not isinstance(event, _QUIET)


# Phrases that several sentences share


def _node(event: Any) -> str:
    return f"node{event.node}.{event.generation}"


def _attempt(event: Any) -> str:
    return f"attempt {event.attempt}{replica_suffix(event.replica)}"


def _rank(event: Any) -> str:
    return f"rank {event.rank}{replica_suffix(event.replica)} on node{event.node}"


def _ranks(event: events.RanksExited | events.RanksHung) -> str:
    return f"ranks {format_ranges(event.ranks)}{replica_suffix(event.replica)}"


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _digests(event: events.UpdateRequested | events.UpdateEnded) -> str:
    return f"{short_digest(event.previous_digest)} -> {short_digest(event.digest)}"


# Sentences that depend on more than the event's fields


def _attempt_started(event: events.AttemptStarted) -> str:
    where = f", rendezvous at {event.master_addr}:{event.master_port}" if event.master_addr else ""
    code = f", with code {short_digest(event.code_digest)}" if event.code_digest else ""
    return f"{_attempt(event)}: {count(event.world_size, 'rank')} starting{where}{code}"


def _step_committed(event: StepCommitted) -> str:
    figures = [f"loss {format_number(event.metrics['loss'])}"] if "loss" in event.metrics else []
    each_s = (event.ended - event.started) / event.steps
    if event.metrics.get("tokens") and each_s > 0:
        figures.append(f"{event.metrics['tokens'] / each_s:,.0f} tokens/s")
    figures += format_metrics(event.metrics, UTILISATION + BREAKDOWN)
    which = f"step {event.step}" if event.steps == 1 else f"steps {event.first}-{event.step}"
    took = f"{duration(each_s)}{'' if event.steps == 1 else ' each'}"
    return ", ".join([f"{which}{replica_suffix(event.replica)} committed in {took}", *figures])


def _recovery_decided(event: events.RecoveryDecided) -> str:
    again = f"; {format_maybe_recomputed(event.recomputed_s)}" if event.recomputed_s else ""
    return f"{event.finding.what}  [{event.finding.code}]; decision: {event.action}{again}"


def _agent_connected(event: events.AgentConnected) -> str:
    alive = f"; ranks {format_numbers([state.rank for state in event.running])} are alive" if event.running else ""
    return f"{_node(event)} joined ({event.hostname}, {event.address}){alive}"


def _ranks_started(event: events.RanksStarted) -> str:
    ranks = format_numbers([state.rank for state in event.ranks])
    warm = [state.rank for state in event.ranks if state.prewarmed]
    how = f", {'all' if len(warm) == len(event.ranks) else format_numbers(warm)} of them prewarmed" if warm else ""
    return f"node{event.node} started ranks {ranks} of {_attempt(event)}{how}"


def _exited(who: str, event: events.RankExited | events.RanksExited, error: str = "") -> str:
    return f"{who} {format_exit(event)}{' (stopped by holdfast)' if event.stopped else _because(error)}"


def _rank_hung(event: events.RankHung) -> str:
    where = f" in {event.top_frame}" if event.top_frame else ""
    after = f", after step {event.last_step}" if event.last_step >= 0 else ""
    unless = "; it hangs if all other ranks wait too" if event.unless_others_work else ""
    return f"{_rank(event)} has completed no step for {duration(event.waited_s)}{where}{after}{unless}"


_DONE: dict[str, str] = {
    FaultAction.KILL: "killed",
    FaultAction.STOP: "stopped",
    FaultAction.PARTITION: "partitioned",
    FaultAction.CLOCK_SKEW: "skewed the clock of",
    FaultAction.REMOVE: "removed",
    FaultAction.RESTORE: "restored",
    FaultAction.FILL: "filled",
    FaultAction.OOM: "exhausted the memory of",
    FaultAction.RAISE: "raised an error in",
    FaultAction.HANG: "hung",
    FaultAction.SLOW: "slowed",
    FaultAction.FAIL: "failed",
    FaultAction.THROTTLE: "throttled",
    FaultAction.LINK_ERRORS: "made link errors of",
    FaultAction.ECC_ERROR: "made an ECC error of",
}


def _fault_injected(event: events.FaultInjected) -> str:
    node = f"node{event.node}" if event.node >= 0 else ""
    where = node if event.target == FaultTarget.NODE else f"{event.target} on {node}" if node else event.target
    after = f" after step {event.step}" if event.step >= 0 else ""
    return f"fault injected: {_DONE.get(event.action, event.action)} {where}{after}"


def _fault_requested(event: events.FaultRequested) -> str:
    which = f" {event.index}" if event.target.is_numbered else ""
    when = f" after step {event.at_step}" if event.at_step is not None else ""
    span = f" for {duration(event.for_s)}" if event.for_s is not None else ""
    much = f" by {event.amount:g}" if event.amount is not None else ""
    return f"fault requested: {event.action} {event.target}{which}{much}{when}{span}"


def _update_requested(event: events.UpdateRequested) -> str:
    what = f": {_digests(event)}" if event.digest else " to the code now in place"
    when = {0.0: "immediately", None: "at the next restart"}.get(event.after_s)
    return f"code update requested{what}, {when or f'at the next restart or in {duration(event.after_s or 0.0)}'}"


def _update_ended(event: events.UpdateEnded) -> str:
    which = _digests(event) if event.digest else "of the code in place"
    because = _because(event.finding.what if event.finding else "")
    return f"the update {which} was {event.outcome} after step {event.step}{because}"


def _node_checked(event: events.NodeChecked) -> str:
    if event.problem:
        failed = (result.check for result in event.results if result.outcome is CheckOutcome.FAILED)
        return f"node{event.node} failed its checks: {', '.join(failed)}"
    unseen = sum(result.outcome is CheckOutcome.NOT_LOOKED_AT for result in event.results)
    left_out = f"; {count(unseen, 'check')} could not look" if unseen else ""
    return f"node{event.node} passed its checks in {duration(event.took_s)}{left_out}"


def _node_probed(event: events.NodeProbed) -> str:
    if event.result is None:
        return f"the probe ended on node{event.node}{_because(event.not_looked_at or event.problem)}"
    suspects = count(len(event.result.suspects), "suspect") if event.result.suspects else "no suspects"
    return f"{count(len(event.nodes), 'node')} probed in {duration(event.result.elapsed_s)}: {suspects}"


def _node_replayed(event: events.NodeReplayed) -> str:
    group = ", ".join(f"node{node}" for node in event.nodes)
    among = f" in the group of {group}" if group else ""
    return f"replay {event.number} ended on node{event.node}{among}{_because(event.problem)}"


def _fabric_observed(event: events.FabricObserved) -> str:
    from holdfast.diagnose.nccl_transport import judge

    line = judge(event).line or f"within node{event.node}, no network needed"
    return f"fabric of {count(event.size, 'rank')}{replica_suffix(event.replica)}, by node{event.node}: {line}"


def _sockets_observed(event: events.SocketsObserved) -> str:
    used = Counter(each.interface for each in event.connections)
    shown = ", ".join(f"{name or 'a removed interface'} ({number})" for name, number in used.most_common())
    first = f", of which {len(event.connections)} over" if event.count > len(event.connections) else " over"
    which = f"node{event.node}{replica_suffix(event.replica)}"
    return f"{count(event.count, 'connection')} of the ranks on {which} to other nodes{first} {shown}"


def _links_measured(event: events.LinksMeasured) -> str:
    which = f"{count(len(event.links), 'connection')} of the ranks on node{event.node}{replica_suffix(event.replica)}"
    return f"{which} to other nodes measured: {format_rate(event.links[0].bytes_s) if event.links else 0} or more"


def _link_slowed(event: events.LinkSlowed) -> str:
    ends, share = event.ends, event.now_bytes_s / max(1, event.before_bytes_s)
    where = f"rank {ends.rank}{replica_suffix(event.replica)} on node{event.node} to {ends.remote}"
    return f"the connection of {where} over {ends.interface} has {share:.0%} of its rate"


def _step_times_compared(event: events.StepTimesCompared) -> str:
    head = (
        f"steps {event.first_step} to {event.last_step}{replica_suffix(event.replica)}: {count(event.ranks, 'rank')} "
    )
    own = f"take {event.own_p50_s:.3g} s by themselves, p99 {event.own_p99_s:.3g} s"
    if not event.slowest or event.ranks == 1:
        return head + own
    slowest = event.slowest[0]
    lag = f"rank {slowest.rank} {event.lag_of(slowest):.0%} over the median, most in {slowest.phase}"
    return f"{head}{own}; the slowest is {lag}"


def _code_fetched(event: events.CodeFetched) -> str:
    code = f"code {short_digest(event.digest)}"
    return f"node{event.node} " + (
        f"cannot have {code}: {event.failure.what}" if event.failure else f"has {code}, for a later start"
    )


_SENTENCES: dict[type[AnyEvent], Callable[[Any], str]] = {
    events.RunCreated: lambda event: (
        f"run {event.run} created"
        + (f"; it resumes {event.resumed_run} after step {event.resumed_step}" if event.resumed_run else "")
    ),
    events.CodeShipped: lambda event: (
        f"code {short_digest(event.digest)} shipped: {count(event.files, 'file')}, {event.bytes:,} bytes"
    ),
    events.ControllerStarted: lambda event: (
        f"a controller (process {event.pid}{event.version and f', holdfast {event.version}'}) took the run over"
    ),
    events.AttemptStarted: _attempt_started,
    events.StepCommitted: _step_committed,
    events.RecoveryDecided: _recovery_decided,
    events.NodeRequested: lambda event: (
        f"{_node(event)} requested{' as a standby' if event.standby else ''}{_because(event.reason)}"
    ),
    events.StandbyPromoted: lambda event: (
        f"node{event.node}, a standby, takes the place of node{event.replaces}{replica_suffix(event.replica)}"
    ),
    events.NodeChecked: _node_checked,
    events.ProbeAdvanced: lambda event: f"probe, {duration(event.elapsed_s)}: {STAGE_TEXT[event.stage]}",
    events.NodeProbed: _node_probed,
    events.NodeReplayed: _node_replayed,
    events.FabricObserved: _fabric_observed,
    events.SocketsObserved: _sockets_observed,
    events.LinksMeasured: _links_measured,
    events.LinkSlowed: _link_slowed,
    events.MonitorsStarted: lambda event: (
        f"{_node(event)} is watched by {', '.join(event.sources)}; {count(len(event.missing), 'source')} missing"
    ),
    events.TrafficStopped: lambda event: event.finding.what,
    events.DeviceFaultObserved: lambda event: f"node{event.node}: {event.finding.what}",
    events.NumericFaultObserved: lambda event: event.finding.what,
    events.CorruptionObserved: lambda event: event.finding.what,
    events.StragglerObserved: lambda event: event.finding.what,
    events.EvidenceKept: lambda event: (
        f"node{event.node} kept {count(event.files, 'file')} of attempt {event.attempt}{replica_suffix(event.replica)}"
        f" in {event.folder}"
    ),
    events.TraceKept: lambda event: (
        f"rank {event.rank}{replica_suffix(event.replica)} "
        + (f"kept no trace of step {event.step}: {event.failure}" if event.failure else f"kept the trace {event.file}")
    ),
    events.StepTimesCompared: _step_times_compared,
    events.StacksCompared: lambda event: (
        f"compared the stacks of attempt {event.attempt}{replica_suffix(event.replica)}: "
        + "; ".join((count(len(event.groups) + event.more_groups, "kind"), *describe_origin(event)))
    ),
    events.StandbyReady: lambda event: f"node{event.node} is ready to take the place of another",
    # The finding's text is in the decision, one line above.
    events.ShutdownDecided: lambda event: (
        f"shutting down ({event.outcome}){'' if event.finding else _because(event.reason)}"
    ),
    events.RunFinished: lambda event: f"run {event.outcome} (exit code {event.exit_code})",
    events.TimerExpired: lambda event: f"deadline {event.timer} passed",
    events.NodeEvicted: lambda event: f"{_node(event)} is evicted: {event.reason}",
    events.NodeTerminated: lambda event: f"{_node(event)} is gone: {event.reason}",
    events.NodePreemptionNotice: lambda event: (
        f"node{event.node} is preempted: its ranks have {duration(event.grace_s)} to save and exit"
    ),
    events.RanksDrained: lambda event: f"ranks on node{event.node} have taken their last step of {_attempt(event)}",
    events.NodeCreated: lambda event: f"{_node(event)} created; waiting for its agent",
    events.NodeUnavailable: lambda event: f"{_node(event)} is unavailable: {event.reason}",
    events.WorldSizeChanged: lambda event: f"{format_world_size(event)}{replica_suffix(event.replica)}",
    events.AgentDisconnected: lambda event: f"lost the connection to {_node(event)}",
    events.FindingRaised: lambda event: f"{event.finding.severity}: {event.finding.what}  [{event.finding.code}]",
    events.AgentConnected: _agent_connected,
    events.RanksStarted: _ranks_started,
    events.RanksPrewarmed: lambda event: (
        f"node{event.node} has the imports done for the next start of ranks {format_numbers(list(event.ranks))}"
        if event.ranks
        else f"node{event.node} has no imports done for the next start of its ranks any more"
    ),
    events.RankExited: lambda event: _exited(_rank(event), event, event.error),
    events.RanksStopped: lambda event: f"no rank of {_attempt(event)} is left on node{event.node}",
    events.RankHung: _rank_hung,
    events.NodesStarted: lambda event: (
        f"nodes {format_ranges(event.nodes)} started ranks {format_ranges(event.ranks)} of {_attempt(event)}"
    ),
    events.NodesStopped: lambda event: f"no rank of {_attempt(event)} is left on nodes {format_ranges(event.nodes)}",
    events.RanksExited: lambda event: _exited(_ranks(event), event),
    events.RanksHung: lambda event: f"{_ranks(event)} have completed no step either",
    events.CheckpointCommitted: lambda event: (
        f"checkpoint of step {event.step}{replica_suffix(event.replica)} complete: {event.path}"
    ),
    events.FaultInjected: _fault_injected,
    events.CancelRequested: lambda event: (
        f"{'forced shutdown' if event.force else 'shutdown'} requested"
        f"{f' by {event.requested_by}' if event.requested_by else ''}"
    ),
    events.FaultRequested: _fault_requested,
    events.CheckpointRequested: lambda event: "checkpoint requested",
    events.ProfileRequested: lambda event: "step profile requested",
    events.StackDumpRequested: lambda event: (
        f"{'stack dump' if event.rounds == 1 else f'{event.rounds} stack dumps'} of all ranks"
        f"{'' if event.replica is None else f' of replica {event.replica}'}"
        f"{', with native frames,' if event.native else ''} requested"
    ),
    events.StacksDumped: lambda event: (
        f"{_rank(event)} {f'is in {event.top_frame}' if event.top_frame else 'gave no stacks'}"
    ),
    events.UpdateRequested: _update_requested,
    events.CodeFetched: _code_fetched,
    events.UpdateEnded: _update_ended,
}
