"""Owns a rank's word with those who watch it: each step is reported, and what anybody wishes all ranks do alike.

The same for every loop: that of a `Session`, and those that a framework owns. Refuses to own what a checkpoint is and
how it is taken (session.py, or the framework), the agreement between ranks (control_group.py) and the wire (agent_client.py).
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn, SupportsFloat

from holdfast.clock import Clock
from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Finding, Severity, replica_suffix
from holdfast.metrics.metric_catalog import DERIVED, Reduction, reduction_of
from holdfast.protocol.metric_validation import DroppedMetrics, limit_metric_count
from holdfast.protocol.rank_messages import (
    Activity,
    ActivityChanged,
    CheckpointAndExitNow,
    ExitingOnRequest,
    Hello,
    InjectRankFault,
    ProfileStepsNow,
    RankCheckpointCommitted,
    RankStep,
    ReplicaDown,
    ReplicaStarting,
    TakeCheckpointNow,
    TransferAndExitNow,
)
from holdfast.train.checkpoint.interval import YoungInterval
from holdfast.train.ft.rank_faults import inject
from holdfast.train.metrics.nan_guard import SKIPPED, NonFiniteGuard, skipped
from holdfast.train.metrics.profiler import Profiler
from holdfast.train.metrics.sink import MetricsSink
from holdfast.train.metrics.step_meter import StepMeter, to_numbers
from holdfast.train.session import shutdown
from holdfast.train.session.agent_client import AgentClient, log_line
from holdfast.train.session.control_group import NOTHING, ActionConsensus, ControlGroup, StepAction
from holdfast.train.session.rank_config import RankConfig

EXIT_DRAIN_S = 0.05
"""Seconds a process waits when it exits, with Python's lock let go. A Gloo thread that is about to drop the tensors of
the last collective needs that lock; one that is still waiting for it when the interpreter ends aborts the process
(pytorch pull request 179291), and a run that had finished would have failed."""

STOP_WAIT_S, STATE_TRANSFER_S = 1.0, 30.0
"""Seconds that a rank which is to leave goes on waiting for other replicas: they may only be slow to come, and it would
leave after a step that it takes with them. Where it leaves for other code they start again meanwhile."""

Handler = Callable[[int, FrameType | None], object] | int | None


class RankCoordinator:
    """Tells the agent of steps and checkpoints, and the loop what it is to do at the end of a step."""

    def __init__(self, config: RankConfig, meter: StepMeter | None = None) -> None:
        """Made by every rank, after init_process_group; without a meter nothing is known of the model."""
        self._agent_client = AgentClient.connect(config.rank_socket, rank=config.rank)
        self._agent_address = config.rank_socket, config.rank
        self._clock = Clock()
        self._agent_client.send(Hello(rank=config.rank, pid=os.getpid(), clock=self._clock.sample))
        self.ranks = ControlGroup.join(announced=config.world_size)
        self._consensus = ActionConsensus(self.ranks)
        self.meter = meter or StepMeter()
        self._profiler = Profiler()
        self._profile_after = config.profile_after_step
        self._nan_guard = NonFiniteGuard(self.ranks.rank, config.replica)
        self._dropped = DroppedMetrics(f"rank {self.ranks.rank}{replica_suffix(config.replica)}")
        self._skipped_saves = 0
        """Checkpoints in a row, up to now."""
        self._save_requested = False
        """Whether somebody has asked for a checkpoint, and waits for word of it."""
        self._metrics_sink = MetricsSink(config) if self.ranks.rank == 0 else None
        self._auto_interval = (
            YoungInterval(nodes=config.nodes, failures=config.attempt) if config.checkpoint_auto else None
        )
        self._every_steps = config.checkpoint_every_steps
        self._every_s = self._auto_interval.every_s if self._auto_interval else config.checkpoint_every_s
        self.peer_checkpoint_every: int | Literal["auto"] = 0
        """Steps between copies of the state to other nodes' memory, which whoever asks for wishes makes; 0: never."""
        self.peer_checkpoint_due: Callable[[], bool] = lambda: False
        """Whether one may begin, where nobody counts steps."""
        self.transfers_state = False
        """Whether whoever asks for wishes can leave the state to the next processes; a stop serves where it cannot."""
        self._requested = NOTHING
        self._lost_replicas: set[int] = set()
        self._activity = Activity.STEPPING
        self._terminated = False
        self._stopping_together = False
        """Whether this rank was asked to stop with all others, so that SIGTERM says nothing more."""
        self._synchronous = config.replica_count > 1 and config.outer_sync is None
        self.stop_together = False
        """Whether all replicas were asked to stop, and agree on the step after which they do."""
        self._previous_sigterm: Handler = None
        self._sigterm_deferred = False
        """Whether SIGTERM is ours."""
        self._saved_at = time.monotonic()
        self._step_ended_at = self._clock()
        self._stalled_s = 0.0

    def start(self) -> None:
        """What came before was getting ready; from here on time is the steps', and SIGTERM waits for their end."""
        self.defer_sigterm()
        atexit.register(time.sleep, EXIT_DRAIN_S)
        shutdown.watch(*self._agent_address)
        atexit.register(_flush_client, weakref.ref(self._agent_client))  # a session that is gone has closed it
        self._saved_at = time.monotonic()
        self._step_ended_at = self._clock()

    def defer_sigterm(self) -> None:
        """Have SIGTERM wait for the end of a step, until `rest`."""
        if not self._sigterm_deferred:
            self._sigterm_deferred = True
            self._previous_sigterm = _install_sigterm(self._note_sigterm)

    def finish_steps(self) -> None:
        """No step follows: SIGTERM means again what it did."""
        self.set_activity(Activity.FINISHED)
        if self._sigterm_deferred:
            self._sigterm_deferred = False
            _install_sigterm(self._previous_sigterm)

    def report_step(self, step: int, *, total: int | None, metrics: Mapping[str, SupportsFloat | None]) -> None:
        """Say that a step is finished; a metric that is None is left out, and a tensor on a GPU is waited for.

        A metric that no event can hold is dropped with a finding; the step and its other metrics are reported.
        """
        given, dropped = to_numbers({"total_steps": total, **metrics})
        started, self._step_ended_at = self._step_ended_at, self._clock()
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        known = {name: value for name, value in given.items() if math.isfinite(value)}
        devices = self.ranks.world_size * max(1, int(known.get("replicas", 1)))  # tokens are those of all replicas
        measured = self.meter.measure(known, step_s=self._step_ended_at - started, devices=devices)
        spent = self._profiler.step(last=step == total)
        self._report_findings(self._profiler.take_findings())
        finite = {**measured, **spent, **given}
        if not all(map(math.isfinite, finite.values())):
            finite = {name: value for name, value in finite.items() if math.isfinite(value)}
        # JSON has no NaN or infinity; a metric that is one is left out, and so is one too many.
        sent, crowded = limit_metric_count({name: value for name, value in finite.items() if name not in DERIVED})
        self._activity = Activity.STEPPING
        self._agent_client.send(
            RankStep(step=step, started=started, ended=self._step_ended_at, checkpoint_s=stalled_s, metrics=sent)
        )
        if self._metrics_sink is not None:
            self._metrics_sink.log(step, finite | {"checkpoint_stall_s": stalled_s})
            self._report_findings(self._metrics_sink.take_findings())
        if (dropped or crowded) and not self._dropped.limit_reached:
            self._report_findings(self._dropped.report(step, self._reportable(dropped | crowded)))
        for finding in self._nan_guard.check(step, given):
            ends = finding.severity is Severity.ERROR
            self._agent_client.report_finding(finding, fatal=ends)
            if ends:
                raise HoldfastError((finding,), ExitCode.CANNOT_RUN_HERE)

    def set_activity(self, to: Activity) -> None:
        """Say what follows, before it does: a checkpoint has another deadline than a step. Nothing follows the rest."""
        if to is not self._activity and self._activity is not Activity.FINISHED:
            self._activity = to
            self._agent_client.send(ActivityChanged(to=to))

    def next_action(self, step: int, *, total: int | None, stop: bool = False) -> StepAction:
        """What all ranks are to do after this step; every rank asks, once. After the last of all it is STOP.

        So it is where all replicas are `parting` after this step.
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
        return agreed & (StepAction.CHECKPOINT | StepAction.PEER_CHECKPOINT)

    @property
    def node_s(self) -> float:
        """Seconds of training so far, of all nodes together; 0 where nobody asks for them."""
        return self._auto_interval.node_s if self._auto_interval else 0.0

    def restore_node_s(self, node_s: float) -> None:
        """The run has trained so long before this attempt."""
        if self._auto_interval is not None:
            self._auto_interval.restore_node_s(node_s)

    def log_resumed(self, step: int, where: str) -> None:
        """Say where training goes on, once for all ranks."""
        if self.ranks.rank == 0:
            log_line(f"resumed after step {step} from {where}")

    def report_finding(self, finding: Finding, *, fatal: bool = False) -> None:
        """Say what was noticed, or what `ends` the program, once for all ranks, of which every one calls this."""
        if self.ranks.rank == 0:
            self._agent_client.report_finding(finding, fatal=fatal)

    def save_started(self) -> None:
        """A checkpoint is begun: the seconds until the next count from here."""
        self._saved_at = time.monotonic()

    def add_stall(self, seconds: float) -> None:
        """The loop stood still for a checkpoint; it is reported with the step in hand."""
        self._stalled_s += seconds
        if self._auto_interval is not None:
            self._auto_interval.add_stall(seconds)

    def checkpoint_committed(self, step: int, path: Path | str, *, took_s: float) -> None:
        """A checkpoint is complete, so long after it was begun."""
        if self.ranks.rank == 0:
            self._agent_client.send(RankCheckpointCommitted(step=step, path=str(path), took_s=took_s))
        if self._auto_interval is not None and (chosen := self._auto_interval.on_saved(took_s=took_s)):
            self.report_finding(chosen)
        if self._auto_interval is not None:
            self._every_s = self._auto_interval.every_s

    def all_finite(self) -> bool:
        """Whether what all ranks have is worth a checkpoint: their losses are numbers; every rank asks."""
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
        """A row of checkpoints that were not taken is over, or training is."""
        count, self._skipped_saves = self._skipped_saves, 0
        if count > 1:
            self.report_finding(skipped(count))

    def fileno(self) -> int | None:
        """Readable where the agent may have said something; None without one."""
        return self._agent_client.fileno()

    def take_lost_replicas(self) -> frozenset[int]:
        """Other replicas that were said to be lost since the last call."""
        self._receive()
        lost, self._lost_replicas = frozenset(self._lost_replicas), set()
        return lost

    def wait_limit_s(self) -> float:
        """Seconds for which other replicas may still be waited for, since no step comes to an end without them."""
        self._receive()
        if self._terminated or self._requested & (StepAction.STOP | StepAction.STOP_TOGETHER):
            return STOP_WAIT_S
        return STATE_TRANSFER_S if StepAction.TRANSFER_STATE in self._requested else math.inf

    def close(self) -> None:
        """All that was to be done is done."""
        self.finish_steps()
        self._report_skipped_saves()
        self._profiler.stop()
        if self._metrics_sink is not None:
            self._metrics_sink.close()
            self._report_findings(self._metrics_sink.take_findings())

    def exit_early(self, step: int) -> NoReturn:
        """End the process after this step, since somebody asked for it: SystemExit(75), for steps are left to do."""
        self.close()
        self._agent_client.send(ExitingOnRequest())
        if self.ranks.rank == 0:
            log_line(f"stopped after step {step}, as asked")
        raise SystemExit(ExitCode.CHECKPOINTED_AND_EXITED)

    def _report_findings(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._agent_client.report_finding(finding)

    def _reportable(self, dropped: Mapping[str, str]) -> dict[str, str]:
        """Those of dropped metrics that this rank is to report: rank 0 all of them, others those that they count in."""
        mine = self.ranks.rank == 0
        return {name: why for name, why in dropped.items() if mine or reduction_of(name) is not Reduction.FIRST}

    def _scheduled_action(self, step: int, total: int | None) -> StepAction:
        """What every rank knows by counting; the last step of all is a stop: nobody is left to agree afterwards."""
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

    def _receive(self) -> None:
        """Take note of what the agent has said since the last time."""
        for request in self._agent_client.requests():
            match request:
                case TakeCheckpointNow():
                    self._requested |= StepAction.CHECKPOINT
                    self._save_requested = True
                case ProfileStepsNow():
                    self._requested |= StepAction.PROFILE
                case CheckpointAndExitNow(all_replicas=together):
                    self._stopping_together = self._stopping_together or (together and self._synchronous)
                    self._requested |= StepAction.STOP_TOGETHER if self._stopping_together else StepAction.STOP
                case TransferAndExitNow():
                    self._requested |= StepAction.TRANSFER_STATE if self.transfers_state else StepAction.STOP
                case ReplicaDown():
                    self._lost_replicas.add(request.replica)
                case InjectRankFault():
                    inject(request.fault)
                case ReplicaStarting():
                    pass

    def _own_action(self) -> StepAction:
        """What this rank was asked for; the seconds are counted by rank 0 alone."""
        terminated = self._terminated  # read first: who is to part with all others hears of it before the signal
        self._receive()
        action, self._requested = self._requested, NOTHING
        if terminated and not self._stopping_together:
            action |= StepAction.STOP
        if action and self._profiler.running:  # another rank was asked before
            action &= ~StepAction.PROFILE
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
    """Install a handler and return the one before; nothing changes outside the main thread, which alone may do so."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
