"""Owns what the machine can ask the world to do; the controller carries it out, and nothing here does I/O.

Every command can be carried out twice without harm: after a controller died, its successor repeats what may not have
arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.events import AnyEvent, FaultRequested
from holdfast.job.backend import NodeId
from holdfast.job.run_spec import CodeArchive


@dataclass(frozen=True, kw_only=True)
class SubmitNodes:
    """Have the back end make these nodes."""

    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True, kw_only=True)
class ReplaceNode:
    """Have the back end remove what is left of a slot's earlier generation and make this one."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True, kw_only=True)
class Cordon:
    """Have the back end put nothing new on the machine under a node."""

    node_id: NodeId


@dataclass(frozen=True, kw_only=True)
class Uncordon:
    """Have the back end use the machine that was under a node again."""

    node_id: NodeId


@dataclass(frozen=True, kw_only=True)
class StartAttempt:
    """Have these nodes start their ranks of an attempt; the controller fills in what each rank is given."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    master_addr: str
    master_port: int
    code: CodeArchive | None = None
    """What they run; none where it lies in place."""


@dataclass(frozen=True, kw_only=True)
class FetchCode:
    """Have these nodes fetch code before ranks are started with it."""

    nodes: tuple[int, ...]
    digest: str


@dataclass(frozen=True, kw_only=True)
class FreeState:
    """Have a node give back the memory in which a replica's ranks left their state."""

    node: int
    replica: int


@dataclass(frozen=True, kw_only=True)
class PrepareNode:
    """Have a standby do all that comes before a start."""

    node: int


@dataclass(frozen=True, kw_only=True)
class StopRanks:
    """Have these nodes end every rank up to and including an attempt."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    grace_s: float
    all_replicas: bool = False
    """Whether all replicas are to stop."""


@dataclass(frozen=True, kw_only=True)
class CheckpointAndExit:
    """Ask the ranks of these nodes to take a checkpoint and leave; those that cannot go on as if nothing was said."""

    nodes: tuple[int, ...]
    reason: str
    transfer_state: bool = False
    """To leave their state in memory instead of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ReportSilentRanks:
    """Have these nodes report the ranks of an attempt that have yet to speak; or every one that they have."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    all_ranks: bool = False


@dataclass(frozen=True, kw_only=True)
class AnnounceReplicaDown:
    """Have these nodes tell their ranks that another replica's attempt is over."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AnnounceReplicaStarting:
    """Have these nodes tell their ranks that another replica is starting."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class InjectFault:
    """Break something on request; `node` is None for the controller itself."""

    fault: FaultRequested
    node: int | None


@dataclass(frozen=True, kw_only=True)
class TakeCheckpoint:
    """Ask every rank to checkpoint at its next step."""


@dataclass(frozen=True, kw_only=True)
class ProfileSteps:
    """Ask every rank where the time of its next steps goes."""


@dataclass(frozen=True, kw_only=True)
class DumpStacks:
    """Have every node say where its ranks stand."""


@dataclass(frozen=True, kw_only=True)
class RecordEvent:
    """Write down a decision; it changes no state, so replaying the log does not need it."""

    event: AnyEvent


@dataclass(frozen=True, kw_only=True)
class FinishRun:
    """Dismiss the agents, have the back end remove every node, and close the log."""


Command = (
    SubmitNodes
    | ReplaceNode
    | Cordon
    | Uncordon
    | StartAttempt
    | FetchCode
    | FreeState
    | PrepareNode
    | StopRanks
    | CheckpointAndExit
    | ReportSilentRanks
    | AnnounceReplicaDown
    | AnnounceReplicaStarting
    | InjectFault
    | TakeCheckpoint
    | ProfileSteps
    | DumpStacks
    | RecordEvent
    | FinishRun
)
Commands = tuple[Command, ...]
