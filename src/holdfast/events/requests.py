"""Events that users trigger through the command line or the API."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from holdfast.events.base import Event


class FaultTarget(StrEnum):
    """What a drill injects a fault into."""

    RANK = "rank"
    NODE = "node"
    AGENT = "agent"
    CONTROLLER = "controller"
    RUN_DIR = "run-dir"
    CHECKPOINTS = "checkpoints"
    LIGHTHOUSE = "lighthouse"
    """The service that forms the quorum of replicas for each step."""
    COLLECTIVE = "collective"
    """A rank's collective."""
    LOSS = "loss"
    """What a rank's model computes, from which it has its loss."""
    GRADIENT = "gradient"
    """A gradient of a rank, before it is reduced."""
    WEIGHTS = "weights"
    """The weights of a rank."""
    OPTIMIZER = "optimizer"
    """A rank's optimizer: its state, or its step."""
    ACTIVATIONS = "activations"
    """What a layer of a rank's model computes."""
    DATA = "data"
    """A rank's wait for samples."""
    FORWARD = "forward"
    """A rank's forward pass."""
    BACKWARD = "backward"
    """A rank's backward pass."""
    COMMUNICATION = "communication"
    """A rank's reduction of gradients."""
    HOST = "host"
    """What a rank does between two steps."""
    GPU = "gpu"
    """A rank's GPU."""
    NVLINK = "nvlink"
    """A link of a rank's GPU."""
    NIC = "nic"
    """The network adapter that a rank uses."""

    @property
    def is_numbered(self) -> bool:
        """Whether a run may have several of this target."""
        return self.is_rank or self in (FaultTarget.NODE, FaultTarget.AGENT)

    @property
    def is_rank(self) -> bool:
        """Whether its number is a rank."""
        return self.is_part_of_rank or self is FaultTarget.RANK or self.is_device

    @property
    def is_part_of_rank(self) -> bool:
        """Whether the fault is one of the rank's own program, which its Session injects."""
        return self is FaultTarget.COLLECTIVE or self.is_number or self.is_phase

    @property
    def is_number(self) -> bool:
        """Whether it is what a rank computes: a fault of it imitates that of a device."""
        return self in (
            FaultTarget.LOSS,
            FaultTarget.GRADIENT,
            FaultTarget.WEIGHTS,
            FaultTarget.OPTIMIZER,
            FaultTarget.ACTIVATIONS,
        )

    @property
    def is_phase(self) -> bool:
        """Whether it is a phase of a rank's step."""
        return self in (
            FaultTarget.DATA,
            FaultTarget.FORWARD,
            FaultTarget.BACKWARD,
            FaultTarget.OPTIMIZER,
            FaultTarget.COMMUNICATION,
            FaultTarget.HOST,
        )

    @property
    def is_device(self) -> bool:
        """Whether it is a device of a rank's node."""
        return self in (FaultTarget.GPU, FaultTarget.NVLINK, FaultTarget.NIC)


class FaultAction(StrEnum):
    """The fault that a drill injects; job/fault_catalog.py lists what each does to each target."""

    KILL = "kill"
    STOP = "stop"
    PARTITION = "partition"
    CLOCK_SKEW = "clock-skew"
    REMOVE = "remove"
    RESTORE = "restore"
    FILL = "fill"
    OOM = "oom"
    RAISE = "raise"
    HANG = "hang"
    NAN = "nan"
    SPIKE = "spike"
    BITFLIP = "bitflip"
    SLOW = "slow"
    DATA_STALL = "data-stall"
    LEAK = "leak"
    FAIL = "fail"
    ECC_ERROR = "ecc-error"
    THROTTLE = "throttle"
    LINK_ERRORS = "link-errors"


MAX_TRACED_RANKS = 64
"""Most ranks that keep a trace of one profile."""

MAX_STACK_ROUNDS = 20

EXPIRES = "holdfast-expires"
"""Request header: monotonic seconds of the controller's machine after which the request has expired.

The controller does not execute an expired request, and the client reports it as expired.
"""


class Request(Event, frozen=True, kw_only=True):
    """A user's request; `request_id` identifies it, so that the client can find it in the log."""

    request_id: str = ""


class CancelRequested(Request, frozen=True, kw_only=True):
    """A user cancelled the run; `force` skips the grace period."""

    force: bool = False
    requested_by: str = ""


class FaultRequested(Request, frozen=True, kw_only=True):
    """A user requested a fault: immediately, or as soon as the target has finished `at_step`."""

    target: FaultTarget
    index: int
    """Global rank or node number; 0 for targets of which there is only one."""
    action: FaultAction
    at_step: int | None = None
    for_s: float | None = None
    """Seconds after which the fault ends by itself; None means never."""
    amount: float | None = None
    """Amount, for faults that take one; job/fault_catalog.py lists the unit."""


class CheckpointRequested(Request, frozen=True, kw_only=True):
    """A user requested that every rank takes a checkpoint at its next step."""


class ProfileRequested(Request, frozen=True, kw_only=True):
    """A user requested a profile of each rank's next steps."""

    ranks: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TRACED_RANKS)] = ()
    """Global ranks that keep a trace; empty: rank 0, the slowest and the fastest rank."""
    memory: bool = False
    """Whether these ranks also keep a snapshot of their GPU memory."""


class StackDumpRequested(Request, frozen=True, kw_only=True):
    """A user requested the stacks of every rank, or the controller those of a replica that is slow or stands still."""

    rounds: Annotated[int, msgspec.Meta(ge=1, le=MAX_STACK_ROUNDS)] = 1
    """Dumps of each rank, some steps apart; of several, only the comparison is logged (`StacksCompared`)."""
    replica: int | None = None
    """None means all."""
    native: bool = False
    """Whether one dump is to have frames of C and C++ too."""


class UpdateRequested(Request, frozen=True, kw_only=True):
    """A user requested that the ranks resume with other code, from their current state.

    `digest` is that of the new archive and `previous_digest` that of the running one; both are empty for code in place.
    """

    digest: str = ""
    previous_digest: str = ""
    bytes: int = 0
    files: int = 0
    cwd: str = "."
    """Working directory of ranks, relative to the folder it is unpacked in."""
    after_s: float | None = 0.0
    """Seconds after which ranks are stopped for the update, unless they restart before; None: they are not stopped."""
