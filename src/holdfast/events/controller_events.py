"""Events that the controller emits: the run's lifecycle and the controller's decisions."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from holdfast.clock import ClockSample
from holdfast.events.base import Event
from holdfast.findings import Finding

FORMAT = 2
"""Version of the event log's format, written in its first line; docs/architecture.md says what raises it."""
OLDEST_FORMAT = 2
"""Oldest format that this release reads and continues: the one before, as soon as a release has written that one."""


class Outcome(StrEnum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RunCreated(Event, frozen=True, kw_only=True, omit_defaults=False):
    """First line of every log: the run exists. `job` is the whole job as JSON, with secrets by reference only."""

    run: str
    job: dict[str, Any]
    format: int = FORMAT
    version: str = ""
    """The holdfast version."""
    resumed_run: str = ""
    """The run whose job, code and checkpoints it continues; empty if none."""
    resumed_step: int = 0
    """The step of that run's newest checkpoint."""


class CodeShipped(Event, frozen=True, kw_only=True):
    """The code that ranks run was archived; `digest` is the archive's SHA-256, `bytes` its size."""

    digest: str
    bytes: int
    files: int
    cwd: str = "."
    """Working directory of ranks, relative to the folder it is unpacked in."""


class ControllerStarted(Event, frozen=True, kw_only=True):
    """A controller process took over the run, for the first time or again."""

    pid: int
    incarnation: str
    clock: ClockSample | None = None
    """The run's clock from here on; a later controller on the same machine continues it."""
    version: str = ""
    """The holdfast version of this controller; empty in logs of versions that did not write it."""


class AttemptStarted(Event, frozen=True, kw_only=True):
    """The controller ordered all ranks of a replica to start, with a rendezvous that no attempt has used before.

    Without agents the cluster starts them, and `master_addr` is empty. `nodes` are in the order of their ranks.
    """

    replica: int
    attempt: int
    world_size: int
    master_addr: str
    master_port: int
    nodes: tuple[int, ...] = ()
    code_digest: str = ""
    """Digest of the code that its ranks run; empty if the code is used in place."""


class ScalingEffect(StrEnum):
    """How a changed world size affects a training setting."""

    KEPT = "kept"
    SCALED = "scaled"
    AS_CONFIGURED = "as configured"
    """The program decides from WORLD_SIZE: it does not take its micro-batches from a Session."""


class WorldSizeChanged(Event, frozen=True, kw_only=True):
    """An attempt starts with a different number of nodes than the previous one, or the first with fewer than requested.

    `global_batch` and `learning_rate` say how they change. `confirmed` is true once ranks have committed a step, which
    shows that they honour the job's settings.
    """

    replica: int
    attempt: int
    nodes: tuple[int, ...]
    missing_nodes: tuple[int, ...] = ()
    """Requested nodes that have not joined."""
    world_size: int
    previous_world_size: int = 0
    """0 at the first attempt."""
    full_world_size: int
    global_batch: ScalingEffect
    samples: int | None = None
    """Samples per step from now on, if known."""
    learning_rate: ScalingEffect
    learning_rate_factor: float = 1.0
    confirmed: bool = False
    remaining_s: float | None = None
    """Estimated seconds to the last step at the previous speed, if the total of steps is known."""
    reason: str = ""
    """Why nodes are missing."""


class StepCommitted(Event, frozen=True, kw_only=True):
    """Every rank of a replica finished an optimizer step; in a long run, several steps (control/step_sampling.py).

    `started` and `ended` are Unix seconds, the latest over the replica's ranks. `checkpoint_s` is the part of that time
    in which its training loop waited for a checkpoint.
    """

    replica: int
    attempt: int
    step: int
    steps: int = 1
    """Number of consecutive steps in this event; `step` is the last."""
    started: float
    ended: float
    checkpoint_s: float = 0.0
    metrics: dict[str, float] = {}
    """From the replica's rank 0, by catalogue name: loss, tokens, ... Values of the last step."""
    step_clock: bool = False
    """Whether the program has no Session: its optimizer steps are numbered from 1 in each attempt, and holdfast knows
    no checkpoint of them. The next attempt may repeat them or not."""

    @property
    def first(self) -> int:
        """The first of its steps."""
        return self.step - self.steps + 1


class RecoveryDecided(Event, frozen=True, kw_only=True):
    """The policy's verdict on a failure: its cause, the action and the reason."""

    replica: int
    attempt: int
    action: str
    failed_at: float
    """Unix seconds at which the failure happened, as closely as the evidence shows."""
    finding: Finding
    first_failed_rank: int | None = None
    """The rank that failed first, if any."""
    log_owner_rank: int | None = None
    """The rank whose log file holds its output, if that is another rank: the first rank of its launcher."""
    recomputed_s: float = 0.0
    """Seconds of work that a program without a Session repeats, unless it loads its own checkpoint."""


class UpdateOutcome(StrEnum):
    """How an update ended."""

    APPLIED = "applied"
    """The new code made enough steps; the run no longer rolls back."""
    ROLLED_BACK = "rolled back"
    """The new code failed soon, and the previous code runs again."""
    ABANDONED = "abandoned"
    """The update never started."""


class UpdateEnded(Event, frozen=True, kw_only=True):
    """An update ended; `step` is the last committed step, `finding` the reason if it was not applied."""

    digest: str
    previous_digest: str
    outcome: UpdateOutcome
    step: int
    finding: Finding | None = None


class NodeRequested(Event, frozen=True, kw_only=True):
    """The controller requested a node from the target; `generation` rises with each replacement of the node slot."""

    node: int
    generation: int
    reason: str = ""
    standby: bool = False
    """Whether the node is a standby."""


class StandbyPromoted(Event, frozen=True, kw_only=True):
    """A standby took the place of a missing node, whose slot becomes a standby's."""

    node: int
    replaces: int
    replica: int


class ShutdownDecided(Event, frozen=True, kw_only=True):
    """The controller began to end the whole run."""

    outcome: Outcome
    reason: str
    exit_code: int
    finding: Finding | None = None


class RunFinished(Event, frozen=True, kw_only=True):
    """Last line of every log: no process of the run is left."""

    outcome: Outcome
    exit_code: int
    reason: str = ""


class TimerExpired(Event, frozen=True, kw_only=True):
    """A timer of the state expired; `timer` is its key."""

    timer: str


class NodeEvicted(Event, frozen=True, kw_only=True):
    """The queue evicts the whole run, or the cluster a node; it does not count against `recovery.max_restarts`."""

    node: int
    generation: int
    reason: str


class NodeTerminated(Event, frozen=True, kw_only=True):
    """The target reports that a node, or the agent on it, no longer exists."""

    node: int
    generation: int
    reason: str


class NodeCreated(Event, frozen=True, kw_only=True):
    """The target created a requested node; its agent has yet to connect."""

    node: int
    generation: int
    backend_id: str = ""
    """The target's id of the node, such as a pod's uid, for a later controller."""
    machine: str = ""
    """The target's name of the machine that it is on, if machines have names."""


class NodeUnavailable(Event, frozen=True, kw_only=True):
    """The target cannot create a node now; it will as soon as it can, without another request."""

    node: int
    generation: int
    reason: str


class AgentDisconnected(Event, frozen=True, kw_only=True):
    """An agent's connection closed; the node may still be healthy."""

    node: int
    generation: int
    incarnation: str


class FindingRaised(Event, frozen=True, kw_only=True):
    """A finding that by itself changes nothing."""

    finding: Finding
