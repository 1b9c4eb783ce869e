"""What the status of a run remembers of its past: failures, world sizes, code versions, findings."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.events import FaultInjected, RecoveryDecided, StepCommitted, UpdateEnded, WorldSizeChanged
from holdfast.findings import Finding, Severity
from holdfast.job import fault_attribution
from holdfast.metrics.metric_catalog import sticky_metrics
from holdfast.os_errors import resolved
from holdfast.report.world_size_text import with_observed_batch

RECENT_STEP_LINES = 64
"""Step events searched for other replicas' steps between a failure and its decision."""


class RecoverySummary(Struct, frozen=True, kw_only=True):
    """One failure and its recovery."""

    replica: int
    attempt: int
    after_s: float
    """Seconds from the run's start to the failure."""
    failed_at: float
    finding: Finding
    first_rank: int | None
    action: str
    step: int | None = None
    """Last step committed before the failure."""
    resumed_step: int | None = None
    """First step committed after the failure; None if there was none, or without a Session, whose steps have no
    numbers that last."""
    until_step_s: float | None = None
    """Seconds from the failure to the end of that step."""
    other_replica_step_s: float | None = None
    """Duration of the first step that another replica committed after the failure; None if none did."""
    maybe_recomputed_s: float = 0.0
    """Seconds that the restart repeats unless the program loads its own checkpoint; 0 if it has a Session."""

    @property
    def recomputed_steps(self) -> int:
        """Number of recomputed steps."""
        if self.step is None or self.resumed_step is None:
            return 0
        return max(0, self.step - self.resumed_step + 1)

    def with_step(self, step: StepCommitted) -> RecoverySummary:
        """The first step after a failure ends its recovery, and the recovery of failures in between."""
        if self.replica != step.replica:
            return self.with_other_replica_step(step)
        if self.until_step_s is not None or step.attempt <= self.attempt:
            return self
        resumed_step = None if step.step_clock else step.first
        return replace(self, resumed_step=resumed_step, until_step_s=max(0.0, step.ended - self.failed_at))

    def with_other_replica_step(self, step: StepCommitted) -> RecoverySummary:
        """Another replica's first step after a failure is its longest: it waited in that step or repeated it."""
        if self.other_replica_step_s is not None or self.replica == step.replica or step.ended < self.failed_at:
            return self
        return replace(self, other_replica_step_s=(step.ended - step.started) / step.steps)


class CodeVersion(Struct, frozen=True, kw_only=True):
    """Code, and the first step it ran."""

    digest: str
    step: int


class RunHistory(Struct, frozen=True, kw_only=True):
    """The past of a run, oldest first."""

    recoveries: tuple[RecoverySummary, ...] = ()
    world_size_changes: tuple[WorldSizeChanged, ...] = ()
    code_versions: tuple[CodeVersion, ...] = ()
    """The code of each step."""
    updates: tuple[UpdateEnded, ...] = ()
    """Outcomes of the requested code updates."""
    raised: Mapping[tuple[str, str], Finding] = field(default_factory=dict[tuple[str, str], Finding])
    """Errors and warnings that caused no recovery, by code and place."""
    end: Finding | None = None
    """The finding that ended the run, if one did."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the last committed step; for metrics reported only with some steps, the latest value."""
    latest_steps: tuple[StepCommitted, ...] = ()

    def with_step(self, step: StepCommitted, code: str) -> RunHistory:
        versions = self.code_versions
        if code and (not versions or versions[-1].digest != code):
            versions = (*versions, CodeVersion(digest=code, step=step.first))
        return replace(
            self,
            recoveries=tuple([recovery.with_step(step) for recovery in self.recoveries]),
            world_size_changes=tuple([_with_observed_batch(world, step) for world in self.world_size_changes]),
            code_versions=versions,
            metrics=sticky_metrics(self.metrics) | step.metrics,
            latest_steps=(*self.latest_steps[1 - RECENT_STEP_LINES :], step),
        )

    def with_recovery(
        self, event: RecoveryDecided, created_at: float | None, step: int | None, fault: FaultInjected | None
    ) -> RunHistory:
        """Add a failure; `step` is the replica's last one, `fault` the injected fault that caused it."""
        recovery = RecoverySummary(
            replica=event.replica,
            attempt=event.attempt,
            after_s=0.0 if created_at is None else max(0.0, event.failed_at - created_at),
            failed_at=event.failed_at,
            finding=fault_attribution.with_injected_cause(event.finding, fault),
            first_rank=event.first_failed_rank,
            action=event.action,
            step=step,
            maybe_recomputed_s=event.recomputed_s,
        )
        for each in self.latest_steps:  # other replicas may have continued before the decision
            recovery = recovery.with_other_replica_step(each)
        return replace(self, recoveries=(*self.recoveries, recovery))

    def with_finding(self, finding: Finding, fault: FaultInjected | None) -> RunHistory:
        if finding.severity is Severity.INFO:
            return replace(self, raised={key: resolved(known, finding) for key, known in self.raised.items()})
        found = fault_attribution.with_injected_cause(finding, fault)
        return replace(self, raised={**self.raised, (finding.code, finding.where): found})


def _with_observed_batch(world: WorldSizeChanged, step: StepCommitted) -> WorldSizeChanged:
    same = (world.replica, world.attempt) == (step.replica, step.attempt)
    return with_observed_batch(world, step) if same and not world.confirmed else world
