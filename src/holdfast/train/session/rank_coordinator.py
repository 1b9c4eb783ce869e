"""Reports a rank's steps to the agent and makes all ranks act alike on requests.

Serves both `Session` loops and loops that a framework owns. Taking checkpoints: session.py or the framework;
consensus between ranks: control_group.py; the wire: agent_client.py. The file is long because reports and requests
share the agreement of a step.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple, NoReturn, SupportsFloat

import torch

from holdfast.clock import Clock
from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Finding, Severity, replica_suffix
from holdfast.metrics.metric_catalog import DERIVED, Reduction, reduction_of
from holdfast.metrics.step_breakdown import StepPart, breakdown_metric
from holdfast.protocol import rank_messages
from holdfast.protocol.metric_validation import DroppedMetrics, limit_metric_count
from holdfast.protocol.rank_messages import Activity
from holdfast.train.accelerator import Accelerator, accelerator_of
from holdfast.train.checkpoint.interval import YoungInterval
from holdfast.train.ft.rank_faults import RankFaults
from holdfast.train.metrics.gradient_guard import SUM, GradientGuard
from holdfast.train.metrics.kept_traces import kept_ranks, write_files
from holdfast.train.metrics.memory_history import MemoryHistory
from holdfast.train.metrics.nan_guard import SKIPPED, NonFiniteGuard, skipped
from holdfast.train.metrics.numeric_watch import NumericWatch
from holdfast.train.metrics.phase_clock import PhaseClock
from holdfast.train.metrics.profiler import STEPS as PROFILED_STEPS
from holdfast.train.metrics.profiler import Profiler
from holdfast.train.metrics.sink import MetricsSink
from holdfast.train.metrics.step_meter import StepMeter, StepNumbers, to_numbers
from holdfast.train.session import shutdown
from holdfast.train.session.agent_client import AgentClient, log_line
from holdfast.train.session.control_group import NOTHING, ActionConsensus, ControlGroup, StepAction
from holdfast.train.session.flight_dump_server import serve_dumps
from holdfast.train.session.rank_config import RankConfig

EXIT_DRAIN_S = 0.05
"""Seconds a process waits at exit with the GIL released. A Gloo thread that is about to free the tensors of the last
collective needs the GIL; if it still waits for the GIL when the interpreter ends, it aborts the process
(pytorch pull request 179291), and a finished run fails."""

STOP_WAIT_S, STATE_TRANSFER_S = 1.0, 30.0
"""Seconds that a rank asked to exit still waits for other replicas: slow ones may arrive, and it exits after the step
that it takes with them. STATE_TRANSFER_S applies when it exits for new code: the other replicas restart meanwhile."""

Handler = Callable[[int, FrameType | None], object] | int | None


class _StepReport(NamedTuple):
    """A finished step, some of whose metrics may not be known yet."""

    step: int
    started: float
    ended: float
    stalled_s: float
    measured: dict[str, float]
    numbers: StepNumbers

    def message(self, metrics: dict[str, float], *, metrics_follow: bool = False) -> rank_messages.RankStep:
        """The message for the agent."""
        return rank_messages.RankStep(
            step=self.step,
            started=self.started,
            ended=self.ended,
            checkpoint_s=self.stalled_s,
            metrics=metrics,
            metrics_follow=metrics_follow,
        )


class RankCoordinator:
    """Reports steps and checkpoints to the agent, and returns what the loop must do after each step."""

    def __init__(
        self,
        config: RankConfig,
        meter: StepMeter | None = None,
        find_accelerator: Callable[[torch.device], Accelerator | None] = accelerator_of,
        *,
        gradients: GradientGuard | None = None,
        phases: PhaseClock | None = None,
        faults: RankFaults | None = None,
    ) -> None:
        """Called by every rank after init_process_group; without a meter, no model metrics are reported."""
        if (step_clock := sys.modules.get("holdfast_step_clock")) is not None:
            step_clock.clock.stop()  # this session reports the steps
        self._agent_client = AgentClient.connect(config.rank_socket, rank=config.rank)
        self._agent_address = config.rank_socket, config.rank
        self._clock = Clock()
        self._agent_client.send(rank_messages.Hello(rank=config.rank, pid=os.getpid(), clock=self._clock.sample))
        serve_dumps(config.rank_socket, config.flight_dump_prefix, config.rank)
        self.ranks = ControlGroup.join(announced=config.world_size)
        self._consensus = ActionConsensus(self.ranks)
        self.meter = meter or StepMeter()
        self._profiler = Profiler()
        self._memory = MemoryHistory()
        self._profile_after = config.profile_after_step
        self._profile_steps = 0
        """Steps left of the profile that all ranks take."""
        self._trace_request = rank_messages.ProfileStepsNow()
        self._nan_guard = NonFiniteGuard(self.ranks.rank, config.replica)
        self._gradients = gradients
        self._numeric_watch = NumericWatch(
            rank=self.ranks.rank,
            replica=config.replica,
            gradients=gradients,
            non_finite=config.non_finite,
            spikes=config.spikes,
        )
        self._phases = phases
        self._faults = faults or RankFaults()
        self._dropped = DroppedMetrics(f"rank {self.ranks.rank}{replica_suffix(config.replica)}")
        self._skipped_saves = 0
        """Checkpoints skipped in a row so far."""
        self._save_requested = False
        """Whether a user requested a checkpoint and waits for the result."""
        self._metrics_sink = MetricsSink(config) if self.ranks.rank == 0 else None
        self._auto_interval = (
            YoungInterval(nodes=config.nodes, failures=config.attempt) if config.checkpoint_auto else None
        )
        self._every_steps = config.checkpoint_every_steps
        self._every_s = self._auto_interval.every_s if self._auto_interval else config.checkpoint_every_s
        self.peer_checkpoint_every: int | Literal["auto"] = 0
        """Steps between peer checkpoints, which the caller of `next_action` takes; 0: never."""
        self.peer_checkpoint_due: Callable[[], bool] = lambda: False
        """Whether a peer checkpoint may begin, with `auto`."""
        self.transfers_state = False
        """Whether the caller of `next_action` can transfer state to the next processes; if not, it stops instead."""
        self._requested = NOTHING
        self.on_replica_lost: Callable[[int], None] = lambda _: None
        """Called with each replica that the agent reports lost, in the thread that receives the message."""
        self._receiving = threading.Lock()
        self._received = deque[rank_messages.AgentToRank]()
        """Other messages, until the training thread processes them."""
        self._activity = Activity.STEPPING
        self._terminated = False
        self._stopping_together = False
        """Whether the agent asked this rank to stop with all others; SIGTERM then adds nothing."""
        self._synchronous = config.replica_count > 1 and config.outer_sync is None
        self.stop_together = False
        """Whether all replicas must stop, after a step that they agree on."""
        self._previous_sigterm: Handler = None
        self._sigterm_deferred = False
        """Whether the coordinator handles SIGTERM."""
        self._saved_at = time.monotonic()
        self._step_ended_at = self._clock()
        self._stalled_s = 0.0
        self._find_accelerator = find_accelerator
        self._late_step: _StepReport | None = None
        """The last step, if its metrics were on a GPU when it was reported."""

    def start(self) -> None:
        """Start timing steps; the time before was setup. From here SIGTERM waits for the end of a step."""
        self.defer_sigterm()
        atexit.register(time.sleep, EXIT_DRAIN_S)
        shutdown.watch(*self._agent_address)
        atexit.register(_flush_client, weakref.ref(self._agent_client))  # a session that is gone has closed it
        self._saved_at = time.monotonic()
        self._step_ended_at = self._clock()

    def defer_sigterm(self) -> None:
        """Defer SIGTERM to the end of a step, until `finish_steps`."""
        if not self._sigterm_deferred:
            self._sigterm_deferred = True
            self._previous_sigterm = _install_sigterm(self._note_sigterm)

    def finish_steps(self) -> None:
        """Restore the previous SIGTERM handler: no step follows."""
        self.set_activity(Activity.FINISHED)
        if self._sigterm_deferred:
            self._sigterm_deferred = False
            _install_sigterm(self._previous_sigterm)

    def report_step(self, step: int, *, total: int | None, metrics: Mapping[str, SupportsFloat | None]) -> None:
        """Report a finished step; skips metrics that are None.

        Metrics on a GPU are reported with the next step. The loop does not wait for those of this step, so the GPU
        always has a step's work left, and no more: else times would not be the GPU's, and a hang would be noticed late.
        A metric that no event can hold is dropped with a finding; the step and its other metrics are reported.
        """
        self._report_late_step()
        sums: Mapping[str, torch.Tensor] = self._gradients.end_step() if self._gradients else {}
        numbers = to_numbers({"total_steps": total, **metrics, **sums}, self._find_accelerator)
        given = numbers.known
        started, self._step_ended_at = self._step_ended_at, self._clock()
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        known = {name: value for name, value in given.items() if math.isfinite(value)}
        measured = self.meter.measure(known, step_s=self._step_ended_at - started, devices=self._devices(known))
        self._report_phases(step, measured.get("data_wait_s", 0.0))
        spent = self._profiler.step(last=step == total)
        if self._profile_steps:
            self._profile_steps = 0 if step == total else self._profile_steps - 1
            if not self._profile_steps:
                self._keep_trace(step, spent)
        self._report_findings(self._profiler.take_findings())
        self._activity = Activity.STEPPING
        report = _StepReport(step, started, self._step_ended_at, stalled_s, {**measured, **spent}, numbers)
        if numbers.late is None:
            self._report_metrics(report, given, reported=False)
        else:
            self._agent_client.send(report.message({}, metrics_follow=True))
            self._late_step = report

    def _keep_trace(self, step: int, spent: Mapping[str, float]) -> None:
        """Write the trace of a profile if this rank is one of those that keep one; every rank calls this."""
        exposed = breakdown_metric(StepPart.COMMUNICATION)
        own_s = sum(spent.get(breakdown_metric(part), 0.0) for part in StepPart) - spent.get(exposed, 0.0)
        rows = self.ranks.all_gather([math.ceil(own_s * 1e6)])
        self.receive()
        pending = [each for each in self._received if isinstance(each, rank_messages.ProfileStepsNow)]
        request, save = (pending or [self._trace_request])[-1], self._profiler.take_trace()
        memory = self._memory.stop()
        self._trace_request = rank_messages.ProfileStepsNow()
        kept = kept_ranks([own_us for (own_us,) in rows], request.ranks)
        if request.traces and save is not None and self.ranks.rank in kept:
            write = partial(write_files, request, save, memory, step=step, rank=self.ranks.rank, kept=len(kept))
            threading.Thread(target=self._send_written, args=(write,)).start()

    def _send_written(self, write: Callable[[], rank_messages.TraceWritten]) -> None:
        """Write the files of a profile while training continues, and report them."""
        self._agent_client.send(write())
        self._agent_client.flush()

    def _report_phases(self, step: int, data_wait_s: float) -> None:
        """Report how the rank spent its last steps, every few steps."""
        longest = self.meter.take_longest_wait()
        if self._phases is not None and (
            times := self._phases.end_step(step, data_s=data_wait_s, wait_s=longest.seconds, loader=longest.loader)
        ):
            self._agent_client.send(rank_messages.RankPhases(times=times, gpu=self.meter.gpu_memory()))
        self._faults.on_step()

    def _report_late_step(self) -> None:
        """Report the last step's metrics if they were on a GPU, as soon as they have arrived."""
        report, self._late_step = self._late_step, None
        if report is None or report.numbers.late is None:
            return
        given = report.numbers.known | report.numbers.late.wait()
        known = {name: value for name, value in given.items() if math.isfinite(value)}
        step_s = report.ended - report.started
        report.measured.update(self.meter.rates(known, step_s=step_s, devices=self._devices(known)))
        self._report_metrics(report, given, reported=True)

    def _report_metrics(self, report: _StepReport, given: Mapping[str, float], *, reported: bool) -> None:
        """Report the metrics of a step, with the step unless that was `reported` before."""
        dropped = report.numbers.dropped
        judged, given = given, {name: value for name, value in given.items() if name != SUM}
        finite = {**report.measured, **given}
        if not all(map(math.isfinite, finite.values())):
            finite = {name: value for name, value in finite.items() if math.isfinite(value)}
        # JSON has no NaN or infinity: such metrics are left out, and so are metrics over the limit.
        sent, crowded = limit_metric_count({name: value for name, value in finite.items() if name not in DERIVED})
        self._agent_client.send(
            rank_messages.RankStepMetrics(step=report.step, metrics=sent) if reported else report.message(sent)
        )
        if self._metrics_sink is not None:
            self._metrics_sink.log(report.step, finite | {"checkpoint_stall_s": report.stalled_s})
            self._report_findings(self._metrics_sink.take_findings())
        if (dropped or crowded) and not self._dropped.limit_reached:
            self._report_findings(self._dropped.report(report.step, self._reportable(dropped | crowded)))
        for fault in self._numeric_watch.check(report.step, judged):
            self._agent_client.send(fault)
            if fault.damaged:
                raise HoldfastError((fault.finding,), ExitCode.CANNOT_RUN_HERE)
        for finding in self._nan_guard.check(report.step, given):
            ends = finding.severity is Severity.ERROR
            self._agent_client.report_finding(finding, fatal=ends)
            if ends:
                raise HoldfastError((finding,), ExitCode.CANNOT_RUN_HERE)

    def _devices(self, known: Mapping[str, float]) -> int:
        """Devices that computed a step with these metrics: its tokens are those of all replicas."""
        return self.ranks.world_size * max(1, int(known.get("replicas", 1)))

    def set_activity(self, to: Activity) -> None:
        """Report the next activity before it starts: a checkpoint has another deadline than a step."""
        if self._phases is not None and to is not Activity.STEPPING:
            self._phases.discard()
        if to is not self._activity and self._activity is not Activity.FINISHED:
            self._activity = to
            self._agent_client.send(rank_messages.ActivityChanged(to=to))

    def next_action(self, step: int, *, total: int | None, stop: bool = False) -> StepAction:
        """The action that all ranks take after this step; every rank calls it once. After the last step it is STOP.

        It is also STOP after the step at which all replicas stop together.
        """
        scheduled = self._scheduled_action(step, total) | (StepAction.STOP if stop else NOTHING)
        agreed = self._consensus.next_action(self._own_action(), scheduled=scheduled)
        if not agreed:
            return agreed
        self.stop_together = self.stop_together or StepAction.STOP_TOGETHER in agreed
        if agreed & (StepAction.STOP | StepAction.TRANSFER_STATE | StepAction.CHECKPOINT):
            self.set_activity(Activity.BETWEEN_STEPS)
        for last in (StepAction.STOP, StepAction.TRANSFER_STATE):
            if last in agreed:
                return last
        if StepAction.PROFILE in agreed:
            self._profiler.start()
            if StepAction.RECORD_MEMORY in agreed:
                self._memory.start()
            self._profile_steps = self._profile_steps or PROFILED_STEPS
        return agreed & (StepAction.CHECKPOINT | StepAction.PEER_CHECKPOINT)

    @property
    def node_s(self) -> float:
        """Seconds of training so far, summed over nodes; 0 if not recorded."""
        return self._auto_interval.node_s if self._auto_interval else 0.0

    def restore_node_s(self, node_s: float) -> None:
        """Set the node seconds that the run trained before this attempt."""
        if self._auto_interval is not None:
            self._auto_interval.restore_node_s(node_s)

    def log_resumed(self, step: int, where: str) -> None:
        """Log where training resumes, once for all ranks."""
        if self.ranks.rank == 0:
            log_line(f"resumed after step {step} from {where}")

    def report_finding(self, finding: Finding, *, fatal: bool = False) -> None:
        """Report a finding, or the `fatal` one that ends the program, once for all ranks; every rank calls this."""
        if self.ranks.rank == 0:
            self._agent_client.report_finding(finding, fatal=fatal)

    def report_corruption(self, message: rank_messages.CorruptionReported) -> None:
        """Report that this rank holds or computes other numbers than the others; only this rank calls it."""
        self._agent_client.send(message)
        self._agent_client.flush()

    def save_started(self) -> None:
        """Record the start of a checkpoint: the interval to the next counts from here."""
        self._saved_at = time.monotonic()

    def add_stall(self, seconds: float) -> None:
        """Add seconds that the loop waited for a checkpoint; reported with the current step."""
        self._stalled_s += seconds
        if self._auto_interval is not None:
            self._auto_interval.add_stall(seconds)

    def checkpoint_committed(self, step: int, path: Path | str, *, took_s: float, size_bytes: int) -> None:
        """Report that a checkpoint is complete, `took_s` after its start."""
        if self.ranks.rank == 0:
            self._agent_client.send(
                rank_messages.RankCheckpointCommitted(step=step, path=str(path), took_s=took_s, size_bytes=size_bytes)
            )
        if self._auto_interval is not None and (chosen := self._auto_interval.on_saved(took_s=took_s)):
            self.report_finding(chosen)
        if self._auto_interval is not None:
            self._every_s = self._auto_interval.every_s

    def all_finite(self) -> bool:
        """Whether the losses of all ranks are finite, so that a checkpoint is worth taking; every rank calls it.

        Waits for a loss that is still on a GPU.
        """
        self._report_late_step()
        sound = self.ranks.all(self._nan_guard.is_finite)
        awaited, self._save_requested = self._save_requested, False
        if sound:
            self._report_skipped_saves()
            return True
        self.save_started()
        self._skipped_saves += 1
        if self._skipped_saves == 1 or awaited:
            self.report_finding(SKIPPED)
        return False

    def _report_skipped_saves(self) -> None:
        """Report a series of skipped checkpoints, at its end or at the end of training."""
        count, self._skipped_saves = self._skipped_saves, 0
        if count > 1:
            self.report_finding(skipped(count))

    def fileno(self) -> int | None:
        """File descriptor that becomes readable when the agent sends; None without an agent."""
        return self._agent_client.fileno()

    def receive(self) -> None:
        """Receive the agent's messages, in any thread; all but lost replicas wait for the training thread."""
        with self._receiving:
            for request in self._agent_client.requests():
                if isinstance(request, rank_messages.ReplicaDown):
                    self.on_replica_lost(request.replica)
                else:
                    self._received.append(request)

    def wait_limit_s(self) -> float:
        """Seconds that this rank may still wait for other replicas; no step ends without them."""
        self._process_messages()
        if self._terminated or self._requested & (StepAction.STOP | StepAction.STOP_TOGETHER):
            return STOP_WAIT_S
        return STATE_TRANSFER_S if StepAction.TRANSFER_STATE in self._requested else math.inf

    def close(self) -> None:
        """Report the rest and close the connection to the agent."""
        self._report_late_step()
        self.finish_steps()
        self._report_skipped_saves()
        self._profiler.stop()
        if self._metrics_sink is not None:
            self._metrics_sink.close()
            self._report_findings(self._metrics_sink.take_findings())

    def exit_early(self, step: int) -> NoReturn:
        """End the process after this step on request: SystemExit(75), because steps remain."""
        self.close()
        self._agent_client.send(rank_messages.ExitingOnRequest())
        if self.ranks.rank == 0:
            log_line(f"stopped after step {step}, as requested")
        raise SystemExit(ExitCode.CHECKPOINTED_AND_EXITED)

    def _report_findings(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._agent_client.report_finding(finding)

    def _reportable(self, dropped: Mapping[str, str]) -> dict[str, str]:
        """Dropped metrics that this rank reports: rank 0 all of them, other ranks those aggregated over ranks."""
        mine = self.ranks.rank == 0
        return {name: why for name, why in dropped.items() if mine or reduction_of(name) is not Reduction.FIRST}

    def _scheduled_action(self, step: int, total: int | None) -> StepAction:
        """Actions that every rank derives from the step; the last step is a stop: no consensus round follows."""
        if step == total:
            return StepAction.STOP
        action = StepAction.PROFILE if step == self._profile_after else NOTHING
        if self._every_steps is not None and step % self._every_steps == 0:
            action |= StepAction.CHECKPOINT
        if (
            self.peer_checkpoint_every != "auto"
            and self.peer_checkpoint_every
            and step % self.peer_checkpoint_every == 0
        ):
            action |= StepAction.PEER_CHECKPOINT
        return action

    def _process_messages(self) -> None:
        """Process the agent's messages since the last call, in the training thread."""
        self.receive()
        while self._received:
            match self._received.popleft():
                case rank_messages.TakeCheckpointNow():
                    self._requested |= StepAction.CHECKPOINT
                    self._save_requested = True
                case rank_messages.ProfileStepsNow() as request:
                    self._requested |= StepAction.PROFILE
                    self._requested |= StepAction.RECORD_MEMORY if request.memory else NOTHING
                    self._trace_request = request
                case rank_messages.CheckpointAndExitNow(all_replicas=together):
                    self._stopping_together = self._stopping_together or (together and self._synchronous)
                    self._requested |= StepAction.STOP_TOGETHER if self._stopping_together else StepAction.STOP
                case rank_messages.TransferAndExitNow():
                    self._requested |= StepAction.TRANSFER_STATE if self.transfers_state else StepAction.STOP
                case rank_messages.InjectRankFault() as drill:
                    self._faults.inject(drill)
                case rank_messages.ReplicaDown() | rank_messages.ReplicaStarting():
                    pass

    def _own_action(self) -> StepAction:
        """Actions requested of this rank; only rank 0 counts the seconds."""
        terminated = self._terminated  # read before the messages: a request to stop together comes before its signal
        self._process_messages()
        action, self._requested = self._requested, NOTHING
        if terminated and not self._stopping_together:
            action |= StepAction.STOP
        if action and self._profiler.running:  # another rank received the request before
            action &= ~(StepAction.PROFILE | StepAction.RECORD_MEMORY)
        if self.peer_checkpoint_every == "auto" and self.ranks.rank == 0 and self.peer_checkpoint_due():
            action |= StepAction.PEER_CHECKPOINT
        overdue = self._every_s is not None and time.monotonic() - self._saved_at >= self._every_s
        return action | StepAction.CHECKPOINT if overdue and self.ranks.rank == 0 else action

    def _note_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self._terminated = True


def _flush_client(client: weakref.ref[AgentClient]) -> None:
    if (open_still := client()) is not None:
        open_still.flush()


def _install_sigterm(handler: Handler) -> Handler:
    """Install a handler and return the previous one; does nothing outside the main thread, where Python forbids it."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
