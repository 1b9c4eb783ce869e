"""Commands of the state machine, which the controller executes; nothing here does I/O.

Every command is idempotent: after a controller died, the next one repeats those that may not have been executed.
Orders of protocol/orders.py are sent as they are; only starts are expanded by the controller.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.events import AnyEvent, FaultRequested
from holdfast.job.backend import NodeId
from holdfast.job.quarantine import MachineEvidence
from holdfast.job.run_spec import CodeArchive
from holdfast.protocol.orders import Order


class Send(Struct, frozen=True, kw_only=True):
    """Send an order to the agents of these nodes; None means all that are connected."""

    order: Order
    nodes: tuple[int, ...] | None = None


class StartAttempt(Struct, frozen=True, kw_only=True):
    """Have these nodes start their ranks of an attempt; the controller fills in each rank's launch."""

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    master_addr: str
    master_port: int
    code: CodeArchive | None = None
    """The code they run; None for code in place."""
    checkpoints_back: int = 0
    """Newest checkpoints that they set aside before they resume."""


class PrepareNode(Struct, frozen=True, kw_only=True):
    """Have a standby do everything that precedes a start."""

    node: int


class CheckNode(Struct, frozen=True, kw_only=True):
    """Have a node check itself before it gets ranks; the controller fills in what the job needs."""

    node: int
    number: int
    """Greater for a check that is to be made anew."""


class StartProbe(Struct, frozen=True, kw_only=True):
    """Have nodes probe each other; the controller fills in each rank's launch."""

    replica: int
    number: int
    members: tuple[int, ...]


class StartReplay(Struct, frozen=True, kw_only=True):
    """Have nodes repeat steps in the groups in which they are; the controller fills in each rank's launch."""

    replica: int
    number: int
    groups: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]
    """Those that get the order."""
    until_step: int
    deadline_s: float
    code: CodeArchive | None = None
    checkpoints_back: int = 0
    """As for the attempt that follows."""


class SubmitNodes(Struct, frozen=True, kw_only=True):
    """Have the target create these nodes."""

    node_ids: tuple[NodeId, ...]


class ReplaceNode(Struct, frozen=True, kw_only=True):
    """Have the target remove the previous generation of a slot and create this one."""

    node_id: NodeId
    reason: str


class AvoidMachine(Struct, frozen=True, kw_only=True):
    """Have the target create no further node of the run on the machine of a failed node."""

    node_id: NodeId
    """The node that failed there."""
    machine: str
    """The target's name of the machine; empty where nodes have none."""
    evidence: MachineEvidence | None = None
    """What later runs and other jobs are to know of it; None if an earlier controller has seen to that."""


class Cordon(Struct, frozen=True, kw_only=True):
    """Have the target schedule nothing new on the machine of a node."""

    node_id: NodeId


class Uncordon(Struct, frozen=True, kw_only=True):
    """Have the target use the machine of a node again."""

    node_id: NodeId


class InjectFault(Struct, frozen=True, kw_only=True):
    """Inject a requested fault that no agent can."""

    fault: FaultRequested


class RecordEvent(Struct, frozen=True, kw_only=True):
    """Write a decision to the log; it changes no state, so replaying the log does not need it."""

    event: AnyEvent


class FinishRun(Struct, frozen=True, kw_only=True):
    """Shut down the agents, have the target remove every node, and close the log."""


Command = (
    Send
    | StartAttempt
    | PrepareNode
    | CheckNode
    | StartProbe
    | StartReplay
    | SubmitNodes
    | ReplaceNode
    | AvoidMachine
    | Cordon
    | Uncordon
    | InjectFault
    | RecordEvent
    | FinishRun
)
Commands = tuple[Command, ...]
