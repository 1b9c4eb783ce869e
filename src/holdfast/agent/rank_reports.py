"""What ranks report to their agent: steps, checkpoints and findings, which it forwards at a limited rate."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct, field

from holdfast.agent.hang_detector import HangDetector, RankProgress
from holdfast.agent.rate_limits import CHECKPOINT_LIMIT, FINDING_LIMIT, DropCounter, DropReason, RateLimiter
from holdfast.agent.step_aggregator import StepAggregator
from holdfast.agent.step_clock import StepClockReader
from holdfast.clock import Clock
from holdfast.events import AgentEvent, CheckpointCommitted, CorruptionObserved, NumericFaultObserved, RanksDrained
from holdfast.findings import Finding, replica_suffix
from holdfast.protocol.clipping import clip_finding
from holdfast.protocol.metric_validation import DroppedMetrics
from holdfast.protocol.orders import StartRanks
from holdfast.protocol.rank_messages import (
    Activity,
    ActivityChanged,
    CorruptionReported,
    ExitingOnRequest,
    FindingReported,
    GpuMemory,
    Hello,
    NumericFaultReported,
    ProfileStepsNow,
    ProgramEnded,
    RankCheckpointCommitted,
    RankPhases,
    RankStep,
    RankStepMetrics,
    RankToAgent,
    StepClockFailed,
    TraceWritten,
)

log = logging.getLogger("holdfast.agent")

DUPLICATE_FINDING_S = 60.0
"""The same finding from other ranks is dropped for this long: a NaN loss, for example, soon reaches every rank."""


class _RankLimits(Struct):
    """Rate limits of one rank."""

    metrics: DroppedMetrics
    findings: RateLimiter = field(default_factory=lambda: RateLimiter(FINDING_LIMIT))
    checkpoints: RateLimiter = field(default_factory=lambda: RateLimiter(CHECKPOINT_LIMIT))
    pending_checkpoint: RankCheckpointCommitted | None = None
    """The latest checkpoint, to be forwarded when `pending_timer` fires."""
    pending_timer: asyncio.TimerHandle | None = None


class RankReports:
    """Handles what the ranks of one attempt on this node report; forwards it to the controller, within limits."""

    def __init__(
        self,
        order: StartRanks,
        *,
        node: int,
        clock: Clock,
        hang_detector: HangDetector,
        step_aggregator: StepAggregator,
        send: Callable[[AgentEvent], int],
        report_finding: Callable[[Finding], None],
        on_step: Callable[[int, int], None],
        on_first_step: Callable[[], None],
        on_gpu_memory: Callable[[int, GpuMemory], None],
        on_program_ended: Callable[[ProgramEnded], None],
        on_trace_written: Callable[[int, TraceWritten], None],
        socket_of: Callable[[int], Path] = lambda _: Path(),
    ) -> None:
        """`socket_of` returns the path of the socket on which a rank reaches this agent."""
        self._replica = order.replica
        self._attempt = order.attempt
        self._world_size = order.world_size
        self._node = node
        self._clock = clock
        self._hang_detector = hang_detector
        self._step_aggregator = step_aggregator
        self._send = send
        self._report_finding = report_finding
        self._on_step = on_step
        self._on_first_step = on_first_step
        """Called at the first step of each rank."""
        self._on_gpu_memory = on_gpu_memory
        self._on_program_ended = on_program_ended
        self._on_trace_written = on_trace_written
        self._socket_of = socket_of
        self._step_clocks = StepClockReader(self._on_clocked_step)
        self._drop_counter = DropCounter(node)
        self._limits: dict[int, _RankLimits] = {}
        """Keyed by rank."""
        self._recent_findings: dict[str, tuple[int, float]] = {}
        """By finding code: the rank that last reported it, and when."""
        self.draining = False
        """Whether the node is draining and no rank has yet reported that it takes no further step."""

    def report_drop_totals(self) -> None:
        """Report how many messages were dropped, at the end of the attempt."""
        for finding in self._drop_counter.totals():
            self._report_finding(finding)

    def stop(self) -> None:
        """The attempt is over."""
        self._step_clocks.stop()

    def profile_clocked(self, request: ProfileStepsNow) -> None:
        """Have the chosen ranks profile their steps if they are here and have a step clock."""
        self._step_clocks.profile(request, world_size=self._world_size)

    def on_close(self, rank: int) -> None:
        """A rank has closed its connection."""
        self._step_clocks.remove_rank(rank)
        self._hang_detector.mark_closed(rank)
        self._step_aggregator.complete(rank)

    def on_drop(self, rank: int, reason: DropReason, sample: str) -> None:
        """A message of a rank was dropped."""
        if (finding := self._drop_counter.count(rank, reason, sample)) is not None:
            log.warning("%s: %s", finding.what, sample)
            self._report_finding(finding)

    def on_message(self, rank: int, message: RankToAgent, dropped: Mapping[str, str]) -> None:
        """Handle a rank's message; `dropped` maps the name of each missing metric to the reason."""
        match message:
            case Hello(step_clock=True):
                if self._step_clocks.add_rank(rank, self._socket_of(rank)):
                    self._hang_detector.add_rank(rank, RankProgress(message.pid, has_session=False))
                    self._step_aggregator.add_rank(rank, step_clock=True)
            case Hello():
                self._step_clocks.remove_rank(rank)
                self._hang_detector.add_rank(
                    rank, RankProgress(message.pid, self._clock.offset_s(message.clock) or 0.0)
                )
                self._step_aggregator.add_rank(rank)
            case RankStep():
                progress = self._hang_detector.progress[rank]
                self._record_step(rank, _shifted(message, -progress.clock_ahead_s), time.monotonic())
                for finding in self._limits_of(rank).metrics.report(message.step, dropped):
                    self._report_finding(finding)
            case RankStepMetrics():
                self._step_aggregator.add_metrics(rank, message)
                for finding in self._limits_of(rank).metrics.report(message.step, dropped):
                    self._report_finding(finding)
            case RankPhases(times=times, gpu=gpu):
                if gpu is not None:
                    self._on_gpu_memory(rank, gpu)
                ahead_s = self._hang_detector.progress[rank].clock_ahead_s
                self._step_aggregator.add_phases(rank, times, ahead_s=ahead_s)
            case ActivityChanged():
                self._hang_detector.progress[rank].set_activity(message.to)
                if self.draining and message.to is Activity.FINISHED:
                    self._report_drained()
            case RankCheckpointCommitted():
                self._on_checkpoint(rank, message)
            case ProgramEnded():
                self._on_program_ended(message)
            case TraceWritten():
                self._on_trace_written(rank, message)
            case StepClockFailed():
                log.warning("the step clock of rank %s is off: %s", message.rank, ascii(message.error[:500]))
            case ExitingOnRequest():
                self._hang_detector.progress[rank].exits_on_request = True
            case FindingReported(finding=finding):
                self._forward_finding(rank, clip_finding(finding))
            case NumericFaultReported():
                self._forward_numeric_fault(rank, message)
            case CorruptionReported():
                self._forward_corruption(rank, message)

    def _record_step(self, rank: int, step: RankStep, ended_at: float) -> None:
        """Record a rank's step, which ended at a time of the monotonic clock."""
        progress = self._hang_detector.progress[rank]
        if progress.step < 0:
            self._on_first_step()
        progress.on_step(step.step, ended_at)
        self._step_aggregator.add(rank, step)
        self._on_step(rank, step.step)

    def _on_clocked_step(self, rank: int, step: RankStep, ended_at: float) -> None:
        """Record a step of a rank without a Session, with times of the monotonic clock."""
        self._record_step(rank, _shifted(step, self._clock() - time.monotonic()), ended_at)

    def _limits_of(self, rank: int) -> _RankLimits:
        if rank not in self._limits:
            who = f"rank {rank}{replica_suffix(self._replica)} on node{self._node}"
            self._limits[rank] = _RankLimits(DroppedMetrics(who))
        return self._limits[rank]

    def _on_checkpoint(self, rank: int, message: RankCheckpointCommitted) -> None:
        """Forward a checkpoint; above the rate limit only the newest, once the limit allows it."""
        limits, now = self._limits_of(rank), time.monotonic()
        if limits.pending_timer is not None:
            limits.pending_checkpoint = message
        elif limits.checkpoints.try_acquire(now):
            self._send_checkpoint(message)
        else:
            limits.pending_checkpoint = message
            wait_s = limits.checkpoints.wait_s(1, now)
            limits.pending_timer = asyncio.get_running_loop().call_later(wait_s, self.send_pending_checkpoint, rank)

    def send_pending_checkpoint(self, rank: int) -> None:
        """Forward the newest checkpoint that the rate limit has delayed."""
        limits = self._limits_of(rank)
        if limits.pending_timer is not None and limits.pending_checkpoint is not None:
            limits.pending_timer.cancel()
            limits.checkpoints.charge(1, time.monotonic())
            self._send_checkpoint(limits.pending_checkpoint)
        limits.pending_timer = limits.pending_checkpoint = None

    def _send_checkpoint(self, message: RankCheckpointCommitted) -> None:
        self._step_aggregator.flush()  # report the step before its checkpoint
        self._send(
            CheckpointCommitted(
                at=self._clock(),
                node=self._node,
                replica=self._replica,
                attempt=self._attempt,
                step=message.step,
                path=message.path,
                took_s=message.took_s,
                size_bytes=message.size_bytes,
            )
        )

    def _forward_finding(self, rank: int, finding: Finding) -> None:
        """Forward a finding, unless another rank has just reported the same, or this rank exceeds its limit."""
        first, at = self._recent_findings.get(finding.code, (rank, 0.0))
        if first != rank and time.monotonic() - at < DUPLICATE_FINDING_S:
            return
        if not self._limits_of(rank).findings.try_acquire(time.monotonic()):
            self.on_drop(rank, DropReason.FINDINGS, finding.what)
            return
        self._recent_findings[finding.code] = rank, time.monotonic()
        self._report_finding(finding)

    def _forward_numeric_fault(self, rank: int, message: NumericFaultReported) -> None:
        """Forward what is wrong with a rank's numbers, unless it exceeds its limit; damage is always reported."""
        if not message.damaged and not self._limits_of(rank).findings.try_acquire(time.monotonic()):
            self.on_drop(rank, DropReason.FINDINGS, message.finding.what)
            return
        self._step_aggregator.flush()  # report the step before what is wrong with it
        self._send(
            NumericFaultObserved(
                at=self._clock(),
                node=self._node,
                replica=self._replica,
                attempt=self._attempt,
                rank=rank,
                step=message.step,
                fault=message.fault,
                quantity=message.quantity,
                parameter_group=message.parameter_group,
                damaged=message.damaged,
                is_origin=message.is_origin,
                finding=clip_finding(message.finding),
            )
        )

    def _forward_corruption(self, rank: int, message: CorruptionReported) -> None:
        self._step_aggregator.flush()
        self._send(
            CorruptionObserved(
                at=self._clock(),
                node=self._node,
                replica=self._replica,
                attempt=self._attempt,
                rank=rank,
                step=message.step,
                agreed_step=message.agreed_step,
                quantity=message.quantity,
                certain=message.certain,
                continues=message.continues,
                finding=clip_finding(message.finding),
            )
        )

    def _report_drained(self) -> None:
        self.draining = False
        self._step_aggregator.flush()
        self._send(RanksDrained(at=self._clock(), node=self._node, replica=self._replica, attempt=self._attempt))


def _shifted(step: RankStep, by_s: float) -> RankStep:
    return msgspec.structs.replace(step, started=step.started + by_s, ended=step.ended + by_s)
