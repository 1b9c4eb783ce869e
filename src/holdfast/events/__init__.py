"""The facts of a run: typed, timestamped, in one append-only log, one file per producer.

State, status, accounting, live view and report are folds over these. Readers ignore events and fields they don't know.
"""

from __future__ import annotations

from holdfast.events.agent import (
    AgentJoined,
    CheckpointCommitted,
    CodeFetched,
    DrillDone,
    NodeLeaving,
    RankExit,
    RankExited,
    RankHung,
    RanksLeaving,
    RanksStarted,
    RanksStopped,
    RankState,
    RanksWarmed,
    StacksTaken,
    StandbyReady,
)
from holdfast.events.base import Event
from holdfast.events.crowd import NodesStarted, NodesStopped, RanksExited, RanksHung, Spans, numbers, spans
from holdfast.events.operator import (
    CancelRequested,
    CheckpointRequested,
    DrillAction,
    DrillRequested,
    DrillTarget,
    SplitRequested,
    StacksRequested,
    UpdateRequested,
)
from holdfast.events.run import (
    FORMAT,
    AgentLeft,
    AttemptStarted,
    CodeShipped,
    ControllerStarted,
    DeadlinePassed,
    Effect,
    FindingRaised,
    NodeEvicted,
    NodeGone,
    NodeMade,
    NodeRequested,
    NodeUnavailable,
    Outcome,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    StandbyPromoted,
    StepCommitted,
    StopDecided,
    UpdateEnded,
    UpdateOutcome,
    WorldChanged,
)

AgentEvent = (
    AgentJoined
    | RanksStarted
    | RanksWarmed
    | StacksTaken
    | CodeFetched
    | StandbyReady
    | RankExited
    | RanksStopped
    | RankHung
    | CheckpointCommitted
    | NodeLeaving
    | RanksLeaving
    | DrillDone
    | FindingRaised
)
OperatorEvent = (
    CancelRequested | DrillRequested | CheckpointRequested | SplitRequested | StacksRequested | UpdateRequested
)
RunEvent = (
    RunCreated
    | CodeShipped
    | ControllerStarted
    | AttemptStarted
    | StepCommitted
    | RecoveryDecided
    | UpdateEnded
    | NodeRequested
    | StandbyPromoted
    | StopDecided
    | RunFinished
    | DeadlinePassed
    | NodeEvicted
    | NodeGone
    | NodeMade
    | NodeUnavailable
    | AgentLeft
    | WorldChanged
)
CrowdEvent = NodesStarted | NodesStopped | RanksExited | RanksHung
AnyEvent = AgentEvent | CrowdEvent | OperatorEvent | RunEvent

__all__ = [
    "FORMAT", "AgentEvent", "AgentJoined", "AgentLeft", "AnyEvent", "AttemptStarted", "CancelRequested",
    "CheckpointCommitted", "CheckpointRequested", "CodeFetched", "CodeShipped", "ControllerStarted", "CrowdEvent",
    "DeadlinePassed", "DrillAction", "DrillDone", "DrillRequested", "DrillTarget", "Effect", "Event",
    "FindingRaised", "NodeEvicted", "NodeGone", "NodeLeaving", "NodeMade", "NodeRequested", "NodeUnavailable",
    "NodesStarted", "NodesStopped", "OperatorEvent", "Outcome", "RankExit", "RankExited", "RankHung", "RankState",
    "RanksExited", "RanksHung", "RanksLeaving", "RanksStarted", "RanksStopped", "RanksWarmed", "RecoveryDecided",
    "RunCreated", "RunEvent", "RunFinished", "Spans", "SplitRequested", "StacksRequested", "StacksTaken",
    "StandbyPromoted", "StandbyReady",
    "StepCommitted", "StopDecided", "UpdateEnded", "UpdateOutcome", "UpdateRequested", "WorldChanged", "numbers",
    "spans",
]  # fmt: skip
