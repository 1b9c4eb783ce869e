"""Events that people produce through the command line or the port."""

from __future__ import annotations

from enum import StrEnum

from holdfast.events.base import Event


class FaultTarget(StrEnum):
    """What a drill breaks."""

    RANK = "rank"
    NODE = "node"
    AGENT = "agent"
    CONTROLLER = "controller"
    RUN_DIR = "run-dir"
    CHECKPOINTS = "checkpoints"
    MEMORY = "memory"
    """A node's."""
    LIGHTHOUSE = "lighthouse"
    """The service that replicas ask who takes the next step."""
    COLLECTIVE = "collective"
    """A rank's."""

    @property
    def is_numbered(self) -> bool:
        """Whether a run may have several of it."""
        return self.is_rank or self in (FaultTarget.NODE, FaultTarget.AGENT, FaultTarget.MEMORY)

    @property
    def is_rank(self) -> bool:
        """Whether its number is a rank's."""
        return self in (FaultTarget.RANK, FaultTarget.COLLECTIVE)


class FaultAction(StrEnum):
    """How a drill breaks it; what each does to each target is in job/fault_catalog.py."""

    KILL = "kill"
    STOP = "stop"
    PARTITION = "partition"
    CLOCK_SKEW = "clock-skew"
    REMOVE = "remove"
    RESTORE = "restore"
    FILL = "fill"
    EXHAUST = "exhaust"
    RAISE = "raise"
    HANG = "hang"
    SLOW = "slow"


EXPIRES = "holdfast-expires"
"""Header of a request: monotonic seconds, of this machine, after which it must not be obeyed any more: whoever asked is
then told that it was not."""


class Request(Event, frozen=True, kw_only=True):
    """Something that somebody asks for; `request` names it, so that who asked can find it in the log."""

    request_id: str = ""


class CancelRequested(Request, frozen=True, kw_only=True):
    """Somebody asked for the run to end; `force` skips the grace period."""

    force: bool = False
    requested_by: str = ""


class FaultRequested(Request, frozen=True, kw_only=True):
    """Somebody asked for a fault: at once, or as soon as `at_step` is finished by the target."""

    target: FaultTarget
    index: int
    """Global rank, or node number; 0 for what there is one of."""
    action: FaultAction
    at_step: int | None = None
    for_s: float | None = None
    """Seconds after which it ends by itself; None is for good."""
    amount: float | None = None
    """How much, where a drill takes that; its row in job/fault_catalog.py says in what unit."""


class CheckpointRequested(Request, frozen=True, kw_only=True):
    """Somebody asked every rank to checkpoint at its next step."""


class ProfileRequested(Request, frozen=True, kw_only=True):
    """Somebody asked every rank where the time of its next steps goes."""


class StackDumpRequested(Request, frozen=True, kw_only=True):
    """Somebody asked where every rank stands."""


class UpdateRequested(Request, frozen=True, kw_only=True):
    """Somebody asked for the ranks to go on with other code, from the state they have.

    `digest` is that of its archive and `former` that of what runs; both are empty where code lies in place.
    """

    digest: str = ""
    previous_digest: str = ""
    bytes: int = 0
    files: int = 0
    cwd: str = "."
    """Where ranks run, relative to the folder it is unpacked in."""
    after_s: float | None = 0.0
    """Ranks are stopped for it so long after, unless they restart before that; none means that they are not."""
