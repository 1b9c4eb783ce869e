"""A run's events: typed, timestamped facts in one append-only log, with one file per producer.

State, status, accounting, the live view and the report are folds over these events. Readers ignore unknown events and
fields.
"""

# pyright: reportUnusedImport=false
# Consumers import every event from here.

from __future__ import annotations

from holdfast.events.agent_events import (
    AgentConnected,
    CheckpointCommitted,
    CodeFetched,
    DeviceFault,
    EvidenceKept,
    ExitReason,
    FabricObserved,
    FaultInjected,
    NodeChecked,
    NodePreemptionNotice,
    NodeProbed,
    NodeReplayed,
    ProbeAdvanced,
    RankExited,
    RankHung,
    RanksDrained,
    RanksPrewarmed,
    RanksStarted,
    RanksStopped,
    RankState,
    StacksDumped,
    StandbyReady,
    TraceKept,
)
from holdfast.events.base import Event
from holdfast.events.batched import NodesStarted, NodesStopped, RanksExited, RanksHung
from holdfast.events.collectives import CollectiveCall, GroupCollectives
from holdfast.events.controller_events import (
    AgentDisconnected,
    AttemptStarted,
    CodeShipped,
    ControllerStarted,
    FindingRaised,
    NodeCreated,
    NodeEvicted,
    NodeRequested,
    NodeTerminated,
    NodeUnavailable,
    Outcome,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    ScalingEffect,
    ShutdownDecided,
    StandbyPromoted,
    StepCommitted,
    TimerExpired,
    UpdateEnded,
    UpdateOutcome,
    WorldSizeChanged,
)
from holdfast.events.ranges import Ranges, from_ranges, to_ranges
from holdfast.events.requests import (
    CancelRequested,
    CheckpointRequested,
    FaultAction,
    FaultRequested,
    FaultTarget,
    ProfileRequested,
    StackDumpRequested,
    UpdateRequested,
)
from holdfast.events.socket_events import LinkRate, LinkSlowed, LinksMeasured, SocketEnds, SocketsObserved
from holdfast.events.watch_events import (
    CorruptionObserved,
    DeviceFaultObserved,
    EqualStacks,
    MonitorsStarted,
    NumericFault,
    NumericFaultObserved,
    RankStepTime,
    StacksCompared,
    StepTimesCompared,
    StragglerObserved,
    TrafficStopped,
)

AgentEvent = (
    AgentConnected
    | RanksStarted
    | RanksPrewarmed
    | StacksDumped
    | CodeFetched
    | StandbyReady
    | NodeChecked
    | ProbeAdvanced
    | NodeProbed
    | NodeReplayed
    | FabricObserved
    | SocketsObserved
    | LinksMeasured
    | LinkSlowed
    | MonitorsStarted
    | TrafficStopped
    | DeviceFaultObserved
    | NumericFaultObserved
    | CorruptionObserved
    | RankExited
    | RanksStopped
    | EvidenceKept
    | TraceKept
    | RankHung
    | CheckpointCommitted
    | NodePreemptionNotice
    | RanksDrained
    | FaultInjected
    | FindingRaised
)
RequestEvent = (
    CancelRequested | FaultRequested | CheckpointRequested | ProfileRequested | StackDumpRequested | UpdateRequested
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
    | ShutdownDecided
    | RunFinished
    | TimerExpired
    | NodeEvicted
    | NodeTerminated
    | NodeCreated
    | NodeUnavailable
    | AgentDisconnected
    | WorldSizeChanged
    | StragglerObserved
    | StacksCompared
    | StepTimesCompared
)
BatchedEvent = NodesStarted | NodesStopped | RanksExited | RanksHung
AnyEvent = AgentEvent | BatchedEvent | RequestEvent | RunEvent
