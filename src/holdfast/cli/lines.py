"""Owns the one plain sentence for each kind of event, and which of them are worth a line while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from holdfast.events import (
    AgentJoined,
    AgentLeft,
    AnyEvent,
    AttemptStarted,
    CancelRequested,
    CheckpointCommitted,
    CheckpointRequested,
    CodeFetched,
    CodeShipped,
    ControllerStarted,
    DeadlinePassed,
    DrillDone,
    DrillRequested,
    FindingRaised,
    NodeEvicted,
    NodeGone,
    NodeLeaving,
    NodeMade,
    NodeRequested,
    NodesStarted,
    NodesStopped,
    NodeUnavailable,
    RankExited,
    RankHung,
    RanksExited,
    RanksHung,
    RanksLeaving,
    RanksStarted,
    RanksStopped,
    RanksWarmed,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    SplitRequested,
    StacksRequested,
    StacksTaken,
    StandbyPromoted,
    StandbyReady,
    StepCommitted,
    StopDecided,
    UpdateEnded,
    UpdateRequested,
    WorldChanged,
)
from holdfast.findings import of_replica
from holdfast.measure.words import SPLIT, UTILISATION, figure, told
from holdfast.report.advance import exit_in_words
from holdfast.report.summary import repeating
from holdfast.report.words import clean, count, duration, listed, listed_spans, short
from holdfast.report.world import in_words

STEP_LINE_EVERY_S = 1.0
"""Least time, by the events' own clock, between two lines of the same kind that come with every step."""


def sentence(event: AnyEvent) -> str:
    """What happened, in one line."""
    return clean(_SENTENCES[type(event)](event))


def line(event: AnyEvent) -> str:
    """The sentence with its local time of day."""
    moment = time.strftime("%H:%M:%S", time.localtime(event.at))
    return f"{moment}.{int(event.at % 1 * 1000):03} {sentence(event)}"


class Narrator:
    """Picks the events that somebody who watches wants to read; steps and checkpoints about one a second."""

    def __init__(self) -> None:
        self._last: dict[type[AnyEvent], float] = {}
        self._steps: dict[int, int] = {}
        """The last step of each replica."""
        self._held: StepCommitted | None = None
        """The last step, where it has not been told."""
        self._early: CheckpointCommitted | None = None
        """Complete, as its node knows, before the other nodes' word for its step."""

    def tell(self, event: AnyEvent) -> list[str]:
        """The lines to print now: none, the event's, or with it those that were held back."""
        match event:
            case StepCommitted():
                self._steps[event.replica] = event.step
                due = self._due(event)
                self._held = None if due else event
                return [*([line(event)] if due else []), *self._checkpoint()]
            case CheckpointCommitted():
                if self._due(event):
                    self._early = event
                return self._checkpoint()
            case _ if _is_notable(event):
                held, self._held = self._held, None
                early, self._early = self._early, None
                return [line(each) for each in (held, early, event) if each is not None]
            case _:
                return []

    def _checkpoint(self) -> list[str]:
        """A checkpoint is told of after its step."""
        early = self._early
        if early is None or self._steps.get(early.replica, -1) < early.step:
            return []
        self._early = None
        step = self._held
        if step is None or (step.replica, step.step) != (early.replica, early.step):
            return [line(early)]
        self._held = None
        return [line(step), line(early)]

    def _due(self, event: StepCommitted | CheckpointCommitted) -> bool:
        last = self._last.get(type(event))
        due = last is None or not 0 <= event.at - last < STEP_LINE_EVERY_S
        if due:
            self._last[type(event)] = event.at
        return due


_QUIET = (
    ControllerStarted,
    RanksStarted,
    RanksWarmed,
    StacksTaken,
    CodeFetched,
    RanksStopped,
    NodesStarted,
    NodesStopped,
    NodeMade,
    AgentLeft,
    DeadlinePassed,
)
"""Steps of the machinery that say nothing to somebody who watches a run."""


def _is_notable(event: AnyEvent) -> bool:
    if isinstance(event, RankExited | RanksExited):
        return not event.stopped and exit_in_words(event) != "exited with code 0"
    return not isinstance(event, _QUIET)


def _created(event: RunCreated) -> str:
    return f"run {event.run} created"


def _code_shipped(event: CodeShipped) -> str:
    return f"code {short(event.digest)} shipped: {count(event.files, 'file')}, {event.bytes:,} bytes"


def _controller_started(event: ControllerStarted) -> str:
    return f"a controller (process {event.pid}) took the run over"


def _attempt_started(event: AttemptStarted) -> str:
    ranks = count(event.world_size, "rank")
    where = f", meeting at {event.master_addr}:{event.master_port}" if event.master_addr else ""
    code = f", with code {short(event.code)}" if event.code else ""
    return f"attempt {event.attempt}{of_replica(event.replica)}: {ranks} told to start{where}{code}"


def _step_committed(event: StepCommitted) -> str:
    figures = [f"loss {figure(event.metrics['loss'])}"] if "loss" in event.metrics else []
    each_s = (event.ended - event.started) / event.steps
    if event.metrics.get("tokens") and each_s > 0:
        figures.append(f"{event.metrics['tokens'] / each_s:,.0f} tokens/s")
    figures += told(event.metrics, UTILISATION + SPLIT)
    which = f"step {event.step}" if event.steps == 1 else f"steps {event.first}-{event.step}"
    took = f"{duration(each_s)}{'' if event.steps == 1 else ' each'}"
    return ", ".join([f"{which}{of_replica(event.replica)} committed in {took}", *figures])


def _recovery_decided(event: RecoveryDecided) -> str:
    again = f"; {repeating(event.repeats_s)}" if event.repeats_s else ""
    return f"{event.finding.what}  [{event.finding.code}]; decision: {event.action}{again}"


def _node_requested(event: NodeRequested) -> str:
    because = f": {event.reason}" if event.reason else ""
    as_standby = " as a standby" if event.standby else ""
    return f"node{event.node}.{event.generation} asked for{as_standby}{because}"


def _standby_promoted(event: StandbyPromoted) -> str:
    return f"node{event.node}, a standby, takes the place of node{event.instead_of}{of_replica(event.replica)}"


def _standby_ready(event: StandbyReady) -> str:
    return f"node{event.node} is ready to take the place of another"


def _node_made(event: NodeMade) -> str:
    return f"node{event.node}.{event.generation} made; its agent is on its way"


def _node_unavailable(event: NodeUnavailable) -> str:
    return f"node{event.node}.{event.generation} cannot be had now: {event.reason}"


def _world_changed(event: WorldChanged) -> str:
    return f"{in_words(event)}{of_replica(event.replica)}"


def _stop_decided(event: StopDecided) -> str:
    # A finding's words are its decision's, which is the line before.
    because = "" if event.finding else f": {event.reason}"
    return f"the run is coming to its end, {event.outcome}{because}"


def _finished(event: RunFinished) -> str:
    return f"run {event.outcome} (exit code {event.exit_code})"


def _deadline_passed(event: DeadlinePassed) -> str:
    return f"deadline {event.deadline} passed"


def _node_evicted(event: NodeEvicted) -> str:
    return f"the queue evicted node{event.node}.{event.generation}: {event.reason}"


def _node_gone(event: NodeGone) -> str:
    return f"node{event.node}.{event.generation} is gone: {event.reason}"


def _node_leaving(event: NodeLeaving) -> str:
    return f"node{event.node} is to be taken away: its ranks have {duration(event.grace_s)} to save and end"


def _ranks_leaving(event: RanksLeaving) -> str:
    return f"ranks on node{event.node} have taken their last step of attempt {event.attempt}{of_replica(event.replica)}"


def _agent_left(event: AgentLeft) -> str:
    return f"lost touch with node{event.node}.{event.generation}"


def _finding_raised(event: FindingRaised) -> str:
    return f"{event.finding.severity}: {event.finding.what}  [{event.finding.code}]"


def _agent_joined(event: AgentJoined) -> str:
    alive = f"; ranks {listed([state.rank for state in event.running])} are alive" if event.running else ""
    return f"node{event.node}.{event.generation} joined ({event.hostname}, {event.address}){alive}"


def _ranks_started(event: RanksStarted) -> str:
    ranks = listed([state.rank for state in event.ranks])
    warm = [state.rank for state in event.ranks if state.warm]
    how = f", {'all' if len(warm) == len(event.ranks) else listed(warm)} of them warm" if warm else ""
    return f"node{event.node} started ranks {ranks} of attempt {event.attempt}{of_replica(event.replica)}{how}"


def _ranks_warmed(event: RanksWarmed) -> str:
    return f"node{event.node} has the imports done for the next start of ranks {listed(list(event.ranks))}"


def _rank_exited(event: RankExited) -> str:
    stopped = " (stopped by holdfast)" if event.stopped else ""
    error = f": {event.error}" if event.error and not event.stopped else ""
    return f"rank {event.rank}{of_replica(event.replica)} on node{event.node} {exit_in_words(event)}{stopped}{error}"


def _ranks_stopped(event: RanksStopped) -> str:
    return f"no rank of attempt {event.attempt}{of_replica(event.replica)} is left on node{event.node}"


def _nodes_started(event: NodesStarted) -> str:
    nodes, ranks = listed_spans(event.nodes), listed_spans(event.ranks)
    return f"nodes {nodes} started ranks {ranks} of attempt {event.attempt}{of_replica(event.replica)}"


def _nodes_stopped(event: NodesStopped) -> str:
    return f"no rank of attempt {event.attempt}{of_replica(event.replica)} is left on nodes {listed_spans(event.nodes)}"


def _ranks_exited(event: RanksExited) -> str:
    stopped = " (stopped by holdfast)" if event.stopped else ""
    return f"ranks {listed_spans(event.ranks)}{of_replica(event.replica)} {exit_in_words(event)}{stopped}"


def _ranks_hung(event: RanksHung) -> str:
    return f"ranks {listed_spans(event.ranks)}{of_replica(event.replica)} have passed no step either"


def _rank_hung(event: RankHung) -> str:
    where = f" in {event.innermost}" if event.innermost else ""
    after = f", after step {event.last_step}" if event.last_step >= 0 else ""
    who = f"rank {event.rank}{of_replica(event.replica)} on node{event.node}"
    return f"{who} has passed no step for {duration(event.waited_s)}{where}{after}"


def _checkpoint_committed(event: CheckpointCommitted) -> str:
    return f"checkpoint of step {event.step}{of_replica(event.replica)} complete: {event.path}"


def _drill_done(event: DrillDone) -> str:
    after = f" after step {event.step}" if event.step >= 0 else ""
    where = f" on node{event.node}" if event.node >= 0 else ""
    return f"drill: {event.action} {event.target}{where}{after}"


def _cancel_requested(event: CancelRequested) -> str:
    who = f" by {event.by}" if event.by else ""
    return f"{'forced end' if event.force else 'end'} asked for{who}"


def _drill_requested(event: DrillRequested) -> str:
    which = f" {event.index}" if event.target.numbered else ""
    when = f" after step {event.at_step}" if event.at_step is not None else ""
    span = f" for {duration(event.for_s)}" if event.for_s is not None else ""
    much = f" by {event.amount:g}" if event.amount is not None else ""
    return f"drill asked for: {event.action} {event.target}{which}{much}{when}{span}"


def _checkpoint_requested(event: CheckpointRequested) -> str:
    return "a checkpoint was asked for"


def _split_requested(event: SplitRequested) -> str:
    return "it was asked where a step's time goes"


def _stacks_requested(event: StacksRequested) -> str:
    return "the stacks of all ranks were requested"


def _stacks_taken(event: StacksTaken) -> str:
    at = f"is in {event.innermost}" if event.innermost else "gave no stacks"
    return f"rank {event.rank}{of_replica(event.replica)} on node{event.node} {at}"


def _update_requested(event: UpdateRequested) -> str:
    what = f": {short(event.former)} -> {short(event.digest)}" if event.digest else " to what lies in place now"
    when = {0.0: "at once", None: "at the next restart"}.get(event.after_s)
    return f"an update was asked for{what}, {when or f'at the next restart or in {duration(event.after_s or 0.0)}'}"


def _code_fetched(event: CodeFetched) -> str:
    problem = f" cannot have code {short(event.digest)}: {event.problem.what}" if event.problem else ""
    return f"node{event.node}{problem or f' has code {short(event.digest)}, for a later start'}"


def _update_ended(event: UpdateEnded) -> str:
    because = f": {event.finding.what}" if event.finding else ""
    which = f"{short(event.former)} -> {short(event.digest)}" if event.digest else "of what lies in place"
    return f"the update {which} was {event.outcome} after step {event.step}{because}"


_SENTENCES: dict[type[AnyEvent], Callable[[Any], str]] = {
    RunCreated: _created,
    CodeShipped: _code_shipped,
    ControllerStarted: _controller_started,
    AttemptStarted: _attempt_started,
    StepCommitted: _step_committed,
    RecoveryDecided: _recovery_decided,
    NodeRequested: _node_requested,
    StandbyPromoted: _standby_promoted,
    StandbyReady: _standby_ready,
    StopDecided: _stop_decided,
    RunFinished: _finished,
    DeadlinePassed: _deadline_passed,
    NodeEvicted: _node_evicted,
    NodeGone: _node_gone,
    NodeLeaving: _node_leaving,
    RanksLeaving: _ranks_leaving,
    NodeMade: _node_made,
    NodeUnavailable: _node_unavailable,
    WorldChanged: _world_changed,
    AgentLeft: _agent_left,
    FindingRaised: _finding_raised,
    AgentJoined: _agent_joined,
    RanksStarted: _ranks_started,
    RanksWarmed: _ranks_warmed,
    RankExited: _rank_exited,
    RanksStopped: _ranks_stopped,
    RankHung: _rank_hung,
    NodesStarted: _nodes_started,
    NodesStopped: _nodes_stopped,
    RanksExited: _ranks_exited,
    RanksHung: _ranks_hung,
    CheckpointCommitted: _checkpoint_committed,
    DrillDone: _drill_done,
    CancelRequested: _cancel_requested,
    DrillRequested: _drill_requested,
    CheckpointRequested: _checkpoint_requested,
    SplitRequested: _split_requested,
    StacksRequested: _stacks_requested,
    StacksTaken: _stacks_taken,
    UpdateRequested: _update_requested,
    CodeFetched: _code_fetched,
    UpdateEnded: _update_ended,
}
