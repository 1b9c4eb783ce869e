"""The status model of a run; status_reducer.py builds it from events, and cli prints it.

It never reads the clock. goodput.py accounts for time, run_history.py keeps the past.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct, field

from holdfast.clock import Clock, ClockSample
from holdfast.diagnose.tcp_pairs import judge_sockets
from holdfast.events import FaultInjected, Outcome, SocketsObserved, StepTimesCompared, WorldSizeChanged
from holdfast.findings import Finding
from holdfast.report.goodput import Account, ReplicaLedger, mean_account, microseconds
from holdfast.report.rank_table import RankTable
from holdfast.report.run_history import RunHistory

STALLED_S = 45.0
"""A replica without a step for this many seconds has no speed; steps are logged within 30 s."""
STALLED_STEPS = 10
"""The same limit in steps at the replica's pace, if that is longer."""


class RunPhase(StrEnum):
    """Phase of a run."""

    PENDING = "pending"
    """Its nodes have not joined yet."""
    STARTING = "starting"
    """Its ranks are starting."""
    RUNNING = "running"
    RECOVERING = "recovering"
    """Something failed; the next step has not been committed yet."""
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class NodePhase(StrEnum):
    """Phase of a node."""

    REQUESTED = "requested"
    UNAVAILABLE = "unavailable"
    CREATED = "created"
    JOINED = "joined"
    UNREACHABLE = "unreachable"
    GONE = "gone"


class NodeStatus(Struct, frozen=True, kw_only=True):
    """One node slot and its current node."""

    node: int
    generation: int = 0
    phase: NodePhase = NodePhase.REQUESTED
    hostname: str = ""
    incarnation: str = ""
    reason: str = ""
    """Why it was requested again, or terminated."""
    standby: bool = False
    """Whether it is a standby node."""
    ready: bool = False
    """Whether the standby node is ready."""
    sources: tuple[str, ...] = ()
    """What its agent's monitors read."""
    missing_sources: dict[str, str] = {}
    """Why each other source is not read."""

    @property
    def name(self) -> str:
        return f"node{self.node}.{self.generation}"


class StepTime(Struct, frozen=True, kw_only=True):
    """A sample for the speed; one log line may cover several steps, `first` to `step`."""

    first: int
    step: int
    started: float
    ended: float
    tokens: float | None
    data_wait_s: float | None = None
    """Of the last of them."""


def mean_step_s(steps: Sequence[StepTime]) -> float | None:
    """Seconds per step of samples in a row, even if the log omits some steps; None if there are none."""
    if not steps:
        return None
    first, last = steps[0], steps[-1]
    spent = last.ended - first.started
    return spent / (last.step - first.first + 1) if spent > 0 and last.step >= first.first else None


class FabricStatus(Struct, frozen=True, kw_only=True):
    """What carries a replica's traffic between nodes in this attempt, by the node that has the worst of it."""

    line: str
    """Such as `infiniband, 8 NICs, GPUDirect, as promised`."""
    severity: int
    """0 if it is as promised, 1 if it is degraded, 2 for another network."""
    node: int
    """-1 for all nodes."""
    communicator: str
    size: int
    """Ranks of the communicator; 0 if sockets were observed."""
    nics: int

    @property
    def weight(self) -> tuple[int, int, bool, int]:
        """The worst counts, then the largest communicator, then the node that uses the fewest network devices."""
        return self.severity, self.size, self.nics > 0, -self.nics


class ReplicaStatus(Struct, frozen=True, kw_only=True):
    """The ranks that restart together, and their progress."""

    replica: int
    attempt: int = 0
    world_size: int = 0
    world_size_change: WorldSizeChanged | None = None
    """The latest change of its world size; none if it never changed."""
    recovering: bool = False
    hung_at: float | None = None
    """When a rank was last reported hung, in Unix seconds; None if the replica has made a step since."""
    zygotes: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    """Ranks with a zygote, by the node that it is on."""
    ranks: RankTable = field(default_factory=RankTable)
    step: int | None = None
    """Last committed step; after a recovery it can be lower than before."""
    total_steps: int | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """The latest value of each metric in this attempt; see metrics/metric_catalog.py."""
    first_step: int | None = None
    """The first step of this attempt; None before it is committed."""
    recent_steps: tuple[StepTime, ...] = ()
    """The latest steps of this attempt."""
    step_times: StepTimesCompared | None = None
    """How long its ranks take for a step in this attempt, as last compared."""
    fabric: FabricStatus | None = None
    """By what NCCL logged."""
    sockets: Mapping[int, SocketsObserved] = field(default_factory=dict[int, SocketsObserved])
    """The latest report of each node on the ranks' sockets in this attempt."""
    probe_stage: str = ""
    """What its nodes probe, before their ranks start."""

    @property
    def worst_fabric(self) -> FabricStatus | None:
        """What carries its traffic between nodes; of two views of it that are as bad, the kernel's."""
        by_sockets = self._fabric_of_sockets
        if by_sockets is None or (self.fabric is not None and self.fabric.severity > by_sockets.severity):
            return self.fabric
        return by_sockets

    @property
    def _fabric_of_sockets(self) -> FabricStatus | None:
        judgement = judge_sockets(self.sockets)
        if not judgement.line:
            return None
        severity = 2 if judgement.finding else 0
        return FabricStatus(line=judgement.line, severity=severity, node=-1, communicator="", size=0, nics=0)

    @property
    def prewarmed(self) -> frozenset[int]:
        """Ranks of this attempt whose next start is prewarmed: their node has a zygote for them."""
        return frozenset(rank for rank, each in self.ranks.items() if rank in self.zygotes.get(each.node, ()))

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the window."""
        return mean_step_s(self.recent_steps)

    @property
    def tokens_per_s(self) -> float | None:
        tokens = [step.tokens for step in self.recent_steps if step.tokens is not None]
        seconds = self.seconds_per_step
        return sum(tokens) / len(tokens) / seconds if tokens and seconds else None

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the last step at the current speed."""
        seconds = self.seconds_per_step
        if seconds is None or self.total_steps is None or self.step is None:
            return None
        return max(0, self.total_steps - self.step) * seconds

    def stalled_s(self, now: float) -> float:
        """Seconds since its last step, if the replica is stalled; 0 if it progresses or has not started."""
        if not self.recent_steps:
            return 0.0
        since_s = now - self.recent_steps[-1].ended
        return since_s if since_s > max(STALLED_S, STALLED_STEPS * (self.seconds_per_step or 0.0)) else 0.0


class CheckpointStatus(Struct, frozen=True, kw_only=True):
    """The latest complete checkpoint."""

    at: float
    step: int
    path: str
    size_bytes: int = 0
    """Of the files of all ranks; 0 if unknown."""


class RunStatus(Struct, frozen=True, kw_only=True):
    """Status of a run according to its event log."""

    run: str = ""
    job: str = ""
    created_at: float | None = None
    resumed_run: str = ""
    """The run that it resumes; empty if none."""
    resumed_step: int = 0
    """The step of that run's newest checkpoint."""
    code: str = ""
    """Digest of the shipped code; empty if ranks run in the working directory."""
    finished_at: float | None = None
    controller_pid: int | None = None
    clock: ClockSample | None = None
    """The run's clock, as recorded by its controller."""
    nodes: Mapping[int, NodeStatus] = field(default_factory=dict[int, NodeStatus])
    min_nodes: int = 0
    """Minimum number of nodes of an elastic job; else 0."""
    replicas: Mapping[int, ReplicaStatus] = field(default_factory=dict[int, ReplicaStatus])
    restarts: int = 0
    checkpoint: CheckpointStatus | None = None
    findings: tuple[Finding, ...] = ()
    """The latest findings, oldest first; a failure that the run recovers from is a warning."""
    findings_at: tuple[float, ...] = ()
    """Unix time in seconds at which each finding was last reported."""
    injected_faults: Sequence[FaultInjected] = ()
    """Injected faults that have not caused a failure yet."""
    cancelling: bool = False
    outcome: Outcome | None = None
    """The outcome, once decided."""
    reason: str = ""
    exit_code: int | None = None
    corrupt_lines: int = 0
    """Number of corrupt log lines, at least 1 if the log's beginning is gone; their events are missing here."""
    history: RunHistory = field(default_factory=RunHistory)
    ledgers: Mapping[int, ReplicaLedger] = field(default_factory=dict[int, ReplicaLedger])
    """What each replica's time was spent on."""

    @property
    def phase(self) -> RunPhase:
        if self.finished_at is not None and self.outcome is not None:
            return RunPhase(self.outcome.value)
        if self.outcome is not None or self.cancelling:
            return RunPhase.STOPPING
        if any(replica.recovering for replica in self.replicas.values()):
            return RunPhase.RECOVERING
        if not self.replicas:
            return RunPhase.PENDING
        started = all(replica.ranks for replica in self.replicas.values())
        return RunPhase.RUNNING if started else RunPhase.STARTING

    @property
    def now(self) -> float:
        """Unix time in seconds on the run's clock, which is unaffected by changes of the wall clock."""
        return Clock(self.clock)()

    @property
    def worst_fabric(self) -> FabricStatus | None:
        """What carries the traffic between nodes, in the replica that has the worst of it."""
        known = [fabric for replica in self.replicas.values() if (fabric := replica.worst_fabric)]
        return max(known, key=lambda each: each.severity, default=None)

    @property
    def fabric(self) -> str:
        """The same in words, such as `TCP instead of infiniband`; empty if not known."""
        return self.worst_fabric.line if self.worst_fabric else ""

    @property
    def is_degraded(self) -> bool:
        """Whether the run has fewer nodes than requested."""
        return any(
            replica.world_size_change and replica.world_size_change.missing_nodes for replica in self.replicas.values()
        )

    @property
    def leader(self) -> ReplicaStatus:
        """The most advanced replica; its step, loss and speed represent the run."""
        replicas = sorted(self.replicas.values(), key=lambda replica: replica.replica)
        return max(replicas, key=lambda replica: replica.step or -1, default=ReplicaStatus(replica=0))

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of all replicas together: each reports the tokens of all that take part in a step."""
        return self.leader.tokens_per_s

    def ledger(self, replica: int) -> ReplicaLedger:
        return self.ledgers.get(replica) or ReplicaLedger(cursor=microseconds(self.created_at or 0.0))

    def replica_accounts(self, now: float | None = None) -> dict[int, Account]:
        """Where each replica's time went; `now` (Unix seconds) ends the account of an unfinished run."""
        if self.created_at is None:
            return {}
        ledgers = self.ledgers or {0: self.ledger(0)}
        if self.finished_at is None and now is not None:
            ledgers = {index: each.wait_until(microseconds(now)) for index, each in ledgers.items()}
        return {index: each.account(alone=len(ledgers) == 1) for index, each in ledgers.items()}

    def account(self, now: float | None = None) -> Account:
        """Where the run's time went: the mean over its replicas."""
        return mean_account(list(self.replica_accounts(now).values()))

    def is_progressing(self, now: float) -> bool:
        """Whether ranks complete steps, so that the speed is current."""
        return self.finished_at is not None or not (self.leader.recovering or self.leader.stalled_s(now))

    @property
    def devices(self) -> int:
        """Devices in the latest step; a rank is one device."""
        return self.leader.world_size * int(self.leader.metrics.get("replicas", 1))

    @property
    def tokens_per_s_per_device(self) -> float | None:
        return self.tokens_per_s / self.devices if self.tokens_per_s is not None and self.devices else None

    @property
    def waiting_for(self) -> str:
        """Why no rank is running, as text; empty if the run waits for nothing."""
        if self.phase not in (RunPhase.PENDING, RunPhase.STARTING, RunPhase.RECOVERING):
            return ""
        if self.controller_pid is None and self.nodes:
            return "no pod runs its command yet"  # a run without agents has nodes but no controller
        if self.controller_pid is None:
            return "no controller has taken the run over yet"
        if not self.nodes:
            return "no node has been requested yet"
        needed = [node for node in self.nodes.values() if not node.standby]
        missing = [node for node in needed if node.phase is not NodePhase.JOINED]
        lost = [str(replica.replica) for replica in self.replicas.values() if replica.recovering]
        if not missing and 0 < len(lost) < len(self.replicas):
            return f"replica {', '.join(lost)} is recovering; {len(self.replicas) - len(lost)} continue"
        if probed := next((replica.probe_stage for replica in self.replicas.values() if replica.probe_stage), ""):
            return f"nodes are probed before their ranks start: {probed}"
        if not missing:
            return "every node is there; the ranks are on their way to their first step"
        names = ", ".join(_pending_text(node) for node in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        least = f" ({self.min_nodes} would do)" if self.min_nodes else ""
        return f"{len(needed) - len(missing)} of {len(needed)} nodes are there{least}; waiting for {names}{more}"


def _pending_text(node: NodeStatus) -> str:
    state = {
        NodePhase.REQUESTED: "requested",
        NodePhase.UNAVAILABLE: "unavailable",
        NodePhase.CREATED: "created, not joined",
        NodePhase.UNREACHABLE: "unreachable",
        NodePhase.GONE: "gone",
        NodePhase.JOINED: "",
    }[node.phase]
    because = f" because {node.reason}" if node.reason else ""
    return f"{node.name} ({state}{because})"
