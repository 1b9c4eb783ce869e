"""Events that the controller produces: the run's own life, and the decisions it took."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from holdfast.clock import ClockSample
from holdfast.events.base import Event
from holdfast.findings import Finding

FORMAT = 2
"""Version of the event log's format, written in its first line."""


class Outcome(StrEnum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RunCreated(Event, frozen=True, kw_only=True, omit_defaults=False):
    """First line of every log: the run exists. `job` is the whole job as JSON data, secrets by reference only."""

    run: str
    job: dict[str, Any]
    format: int = FORMAT
    version: str = ""
    """holdfast's own version."""


class CodeShipped(Event, frozen=True, kw_only=True):
    """The code that ranks run was put into an archive; `digest` is its SHA-256, `bytes` its size."""

    digest: str
    bytes: int
    files: int
    cwd: str = "."
    """Where ranks run, relative to the folder it is unpacked in."""


class ControllerStarted(Event, frozen=True, kw_only=True):
    """A controller process took over the run (again)."""

    pid: int
    incarnation: str
    clock: ClockSample | None = None
    """The clock of the run from here on; a successor on the same machine goes on with it."""


class AttemptStarted(Event, frozen=True, kw_only=True):
    """All ranks of a replica were told to start, with a rendezvous nobody has used before.

    Without agents it is the cluster that starts them, and `master_addr` is empty.
    `nodes` are those it has, in the order of their ranks.
    """

    replica: int
    attempt: int
    world_size: int
    master_addr: str
    master_port: int
    nodes: tuple[int, ...] = ()
    code_digest: str = ""
    """Digest of the code that its ranks run; empty where that lies in place."""


class ScalingEffect(StrEnum):
    """What a changed world size does to a quantity of the training."""

    KEPT = "kept"
    SCALED = "scaled"
    AS_CONFIGURED = "as configured"
    """Whatever the program makes of its WORLD_SIZE: it does not take its micro-batches from a Session."""


class WorldSizeChanged(Event, frozen=True, kw_only=True):
    """An attempt starts with another number of nodes than the one before, or at first with fewer than were asked for.

    `global_batch` and `learning_rate` say what becomes of them, as far as is known (`confirmed`): that ranks honour
    what the job says is known when they have committed a step.
    """

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    missing_nodes: tuple[int, ...] = ()
    """Nodes that were asked for and are not there."""
    world_size: int
    previous_world_size: int = 0
    """0 at the first attempt."""
    full_world_size: int
    global_batch: ScalingEffect
    samples: int | None = None
    """Samples in a step from now on, where that is known."""
    learning_rate: ScalingEffect
    learning_rate_factor: float = 1.0
    confirmed: bool = False
    remaining_s: float | None = None
    """Seconds to the last step, guessed from the former speed, where steps and their total are known."""
    reason: str = ""
    """Why nodes are missing."""


class StepCommitted(Event, frozen=True, kw_only=True):
    """An optimiser step was finished by every rank of a replica; in a long run, several steps (control/step_sampling.py).

    `started` and `ended` are Unix seconds: the replica's own boundaries (latest over its ranks); `checkpoint_s` is the
    part of that time its loop waited for a checkpoint.
    """

    replica: int
    attempt: int
    step: int
    steps: int = 1
    """How many steps this stands for, one after the other; `step` is the last."""
    started: float
    ended: float
    checkpoint_s: float = 0.0
    metrics: dict[str, float] = {}
    """From the replica's rank 0, by catalogue name: loss, tokens, ... Of the last step."""

    @property
    def first(self) -> int:
        """The first of its steps."""
        return self.step - self.steps + 1


class RecoveryDecided(Event, frozen=True, kw_only=True):
    """A failure was judged: what it was, what will be done, and why."""

    replica: int
    attempt: int
    action: str
    failed_at: float
    """Unix seconds at which the failure happened, as near as its evidence tells."""
    finding: Finding
    first_failed_rank: int | None = None
    """The rank that failed first, when one did."""
    log_owner_rank: int | None = None
    """The rank in whose file its output is, where that is another's: its launcher's first."""
    recomputed_s: float = 0.0
    """Seconds of a program without reported steps that its restart repeats, unless it loads a checkpoint of its own."""


class UpdateOutcome(StrEnum):
    """What became of an update."""

    APPLIED = "applied"
    """Its code has made steps enough, and there is no way back to the former."""
    ROLLED_BACK = "rolled back"
    """Its code failed soon, and the former runs again."""
    ABANDONED = "abandoned"
    """It was never started."""


class UpdateEnded(Event, frozen=True, kw_only=True):
    """An update is over; `step` is the last that was committed, `finding` what stood in its way."""

    digest: str
    previous_digest: str
    outcome: UpdateOutcome
    step: int
    finding: Finding | None = None


class NodeRequested(Event, frozen=True, kw_only=True):
    """A node slot was asked for from the back end; `generation` rises each time it is replaced."""

    node: int
    generation: int
    reason: str = ""
    standby: bool = False
    """Whether it is to wait until it takes the place of another."""


class StandbyPromoted(Event, frozen=True, kw_only=True):
    """A standby took the place of a node that is missing, whose slot is a standby's from now on."""

    node: int
    replaces: int
    replica: int


class ShutdownDecided(Event, frozen=True, kw_only=True):
    """The whole run is being brought to its end."""

    outcome: Outcome
    reason: str
    exit_code: int
    finding: Finding | None = None


class RunFinished(Event, frozen=True, kw_only=True):
    """Last line of every log: nothing of the run is left running."""

    outcome: Outcome
    exit_code: int
    reason: str = ""


class TimerExpired(Event, frozen=True, kw_only=True):
    """A deadline that the state carried has passed; `deadline` is its key."""

    timer: str


class NodeEvicted(Event, frozen=True, kw_only=True):
    """The queue takes a node back, with the rest of the run; it counts nothing against `recovery.max_restarts`."""

    node: int
    generation: int
    reason: str


class NodeTerminated(Event, frozen=True, kw_only=True):
    """The back end says that a node, or the agent on it, no longer exists."""

    node: int
    generation: int
    reason: str


class NodeCreated(Event, frozen=True, kw_only=True):
    """The back end has made a node that was asked for; its agent is on its way."""

    node: int
    generation: int
    backend_id: str = ""
    """What the back end knows it by, such as a pod's uid, for whoever takes the run over."""


class NodeUnavailable(Event, frozen=True, kw_only=True):
    """The back end cannot make a node now; it will as soon as it can, unasked."""

    node: int
    generation: int
    reason: str


class AgentDisconnected(Event, frozen=True, kw_only=True):
    """An agent's connection closed; the node may be well."""

    node: int
    generation: int
    incarnation: str


class FindingRaised(Event, frozen=True, kw_only=True):
    """Something worth saying that by itself changes nothing."""

    finding: Finding
