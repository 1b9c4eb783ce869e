"""Commands of the state machine, which the controller executes; nothing here does I/O.

Every command is idempotent: after a controller died, the next one repeats those that may not have been executed.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.events import AnyEvent, FaultRequested
from holdfast.job.backend import NodeId
from holdfast.job.run_spec import CodeArchive


@dataclass(frozen=True, kw_only=True)
class SubmitNodes:
    """Have the back end create these nodes."""

    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True, kw_only=True)
class ReplaceNode:
    """Have the back end remove the previous generation of a slot and create this one."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True, kw_only=True)
class Cordon:
    """Have the back end schedule nothing new on the machine of a node."""

    node_id: NodeId


@dataclass(frozen=True, kw_only=True)
class Uncordon:
    """Have the back end use the machine of a node again."""

    node_id: NodeId


@dataclass(frozen=True, kw_only=True)
class StartAttempt:
    """Have these nodes start their ranks of an attempt; the controller fills in each rank's launch."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    master_addr: str
    master_port: int
    code: CodeArchive | None = None
    """The code they run; None for code in place."""


@dataclass(frozen=True, kw_only=True)
class FetchCode:
    """Have these nodes download code before ranks start with it."""

    nodes: tuple[int, ...]
    digest: str


@dataclass(frozen=True, kw_only=True)
class FreeState:
    """Have a node free the memory that holds the state of a replica's ranks."""

    node: int
    replica: int


@dataclass(frozen=True, kw_only=True)
class PrepareNode:
    """Have a standby do everything that precedes a start."""

    node: int


@dataclass(frozen=True, kw_only=True)
class StopRanks:
    """Have these nodes stop every rank up to and including an attempt."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    grace_s: float
    all_replicas: bool = False
    """Whether all replicas are to stop."""


@dataclass(frozen=True, kw_only=True)
class CheckpointAndExit:
    """Request that the ranks of these nodes take a checkpoint and exit; ranks that cannot continue unaffected."""

    nodes: tuple[int, ...]
    reason: str
    transfer_state: bool = False
    """Whether to keep their state in memory instead of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ReportSilentRanks:
    """Have these nodes report the ranks of an attempt that have sent no hello yet, or with `all_ranks` every rank."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    all_ranks: bool = False


@dataclass(frozen=True, kw_only=True)
class AnnounceReplicaDown:
    """Have these nodes notify their ranks that another replica's attempt is over."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AnnounceReplicaStarting:
    """Have these nodes notify their ranks that another replica is starting."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class InjectFault:
    """Inject a requested fault; `node` is None for the controller itself."""

    fault: FaultRequested
    node: int | None


@dataclass(frozen=True, kw_only=True)
class TakeCheckpoint:
    """Request a checkpoint from every rank at its next step."""


@dataclass(frozen=True, kw_only=True)
class ProfileSteps:
    """Request a step profile from every rank."""


@dataclass(frozen=True, kw_only=True)
class DumpStacks:
    """Have every node dump the stacks of its ranks."""


@dataclass(frozen=True, kw_only=True)
class RecordEvent:
    """Write a decision to the log; it changes no state, so replaying the log does not need it."""

    event: AnyEvent


@dataclass(frozen=True, kw_only=True)
class FinishRun:
    """Shut down the agents, have the back end remove every node, and close the log."""


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
