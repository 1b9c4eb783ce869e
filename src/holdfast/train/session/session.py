"""Connects a user's training loop to the run: reports finished steps, saves when due, exits when requested.

Works alike under holdfast, under torchrun and in a bare `python train.py`. Checkpoint files: checkpoint/manager.py;
messages and requests: rank_coordinator.py. The file is long because it is the public API of a training loop.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, SupportsFloat, TypeVar

from torch import nn
from torch.optim import Optimizer

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding, Severity
from holdfast.metrics.flops import FlopsPerToken
from holdfast.protocol.rank_messages import Activity
from holdfast.protocol.watch_levels import WatchLevel
from holdfast.train.checkpoint import rng
from holdfast.train.checkpoint.manager import CheckpointManager, Saved
from holdfast.train.checkpoint.remote_tier import RemoteTier
from holdfast.train.checkpoint.retention_policy import RetentionPolicy
from holdfast.train.checkpoint.stall_clock import StallClock
from holdfast.train.checkpoint.storage import CheckpointStorage, ReadOnlyStorage, SharedStorage, not_saved
from holdfast.train.checkpoint.tiered_storage import TieredStorage
from holdfast.train.checkpoint.train_state import Stateful, TrainState
from holdfast.train.checkpoint.writer_fence import REFUSALS, to_error
from holdfast.train.data.elastic_data import Data
from holdfast.train.data.prefetcher import Prefetcher
from holdfast.train.data.sharding import Batch, MicroBatch, ShardPlan
from holdfast.train.ft.group_replay import GroupReplay
from holdfast.train.ft.lr_scaling import LearningRateScaler
from holdfast.train.ft.peer_checkpoint import PeerCheckpointer
from holdfast.train.ft.rank_faults import RankFaults
from holdfast.train.ft.rank_verifier import AgreedSteps, RankVerifier
from holdfast.train.ft.replica_strategy import (
    ReplicaStrategy,
    StoppedWhileWaiting,
    SyncReplicas,
    TrainingProgress,
)
from holdfast.train.ft.semi_sync import SemiSyncReplicas
from holdfast.train.ft.state_verifier import CheckpointTrust
from holdfast.train.metrics.gradient_guard import GradientGuard
from holdfast.train.metrics.phase_clock import PhaseClock
from holdfast.train.metrics.profiler import waiting_for_checkpoint
from holdfast.train.metrics.step_meter import StepMeter
from holdfast.train.session import fast_exit
from holdfast.train.session.agent_client import log_line
from holdfast.train.session.control_group import NOTHING, ControlGroup, StepAction
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.rank_coordinator import RankCoordinator
from holdfast.train.weak_method import weakly

Item = TypeVar("Item")
_SAVES = StepAction.CHECKPOINT | StepAction.STOP | StepAction.TRANSFER_STATE
_STATE_NAME = re.compile(r"[\w-]+")


class Session:
    """Reports, saves and resumes a training loop.

    ::

        session = Session(model=model, optimizer=optimizer)
        for step in session.steps(1000):
            ...
            session.commit(loss=loss)
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Stateful | None = None,
        state: Mapping[str, Stateful] | None = None,
        config: RankConfig | None = None,
        flops_per_token: FlopsPerToken | float | None = None,
        sequence_length: int | None = None,
        report_to: Sequence[str] | None = None,
    ) -> None:
        """Resume from the newest complete checkpoint, if there is one; called by every rank, after init_process_group.

        `state` has any other objects with a state_dict, by name, such as `{"scaler": scaler, "ema": ema}`. Modules are
        saved like the model, for any number of ranks; other objects are saved per rank. `config` replaces the
        configuration from the environment variables.

        MFU uses the FLOPs of a token: `flops_per_token` if given (a plain number counts attention in full), else the
        model's transformers config, for sequences of `sequence_length` tokens. Without a `sequence_length`, the session
        uses the tokens of a step divided by its samples.

        `report_to` names trackers that also receive each step: "tensorboard", "wandb", "mlflow".
        """
        random = rng.capture()
        settings = config or RankConfig.from_env()
        if settings.replay_until is not None:
            settings = settings.for_replay()
        if report_to is not None:
            settings = replace(settings, report_to=tuple(report_to))
        self.step = 0
        """Optimizer steps finished so far, including those before a restart."""
        self._samples: int | None = None
        """Samples of those steps; None if the loop never used micro-batches."""
        meter = StepMeter(model, flops_per_token=flops_per_token, sequence_length=sequence_length)
        watched = settings.non_finite is not WatchLevel.OFF
        self._coordinator = RankCoordinator(
            settings,
            meter,
            gradients=GradientGuard(model, optimizer) if watched else None,
            phases=(phases := PhaseClock(model, optimizer) if settings.stragglers is not WatchLevel.OFF else None),
            faults=RankFaults(model, optimizer, meter=meter, phases=phases),
        )
        ranks = self._coordinator.ranks
        if settings.rank_socket is None and ranks.rank == 0:
            log_line(settings.checkpoint_summary)
        self._prefetcher = Prefetcher(self._coordinator.report_finding)
        self._saved_world_size = 0
        """World size of the checkpoint, if it differs and the change is not reported yet."""
        train_state = self._train_state = TrainState(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            state=_validate_state(state or {}),
            data=self._prefetcher,
            sequence_length=sequence_length,
        )
        accelerator = train_state.accelerator
        self._on_host, self._save_stalls = accelerator is None, StallClock(accelerator)
        if settings.checkpoint_path is not None or settings.replica_count > 1:
            train_state.refuse_unsafe()
        self._checkpoints: CheckpointManager | None = None
        self._peer_checkpointer: PeerCheckpointer | None = None
        if settings.checkpoint_path is not None:
            storage = _make_storage(settings, settings.checkpoint_path, ranks)
            peer_checkpointer = self._peer_checkpointer = _make_peer_checkpointer(settings, train_state, ranks)
            self._checkpoints = CheckpointManager(
                storage,
                train_state=train_state,
                ranks=ranks,
                transfer_memory=settings.transfer_memory,
                writer=settings.writer,
                peer_checkpointer=peer_checkpointer,
                durable=settings.checkpoint_durable,
                checkpoints_back=settings.checkpoints_back,
                resumed_step=settings.resumed_step,
            )
            self._coordinator.transfers_state = True
        if self._peer_checkpointer is not None:
            self._coordinator.peer_checkpoint_every, self._coordinator.peer_checkpoint_due = (
                settings.peer_checkpoints,
                self._peer_checkpointer.is_due,
            )
            if (placement := self._peer_checkpointer.placement_finding()) is not None:
                self._coordinator.report_finding(placement)
        self._replicas = ReplicaStrategy(model)
        agreed = AgreedSteps(keep=weakly(self._agreed), set_aside_after=weakly(self._set_aside_after))
        self._rank_verifier = RankVerifier(settings, model, optimizer, self._coordinator, agreed)
        if settings.replica_count > 1:
            strategy = SyncReplicas if settings.outer_sync is None else SemiSyncReplicas
            trust = CheckpointTrust(agreed=self._agreed, set_aside_after=self._set_aside_after)
            self._replicas = strategy(settings, train_state, self._coordinator, self._resume, trust)
        else:
            self._resume()
            random = rng.capture() if self.step else random
            self._rank_verifier.restored(self.step)
        self._replay = GroupReplay.of(settings, self.step, model, optimizer, ranks)
        self._batch_world_size = settings.batch_world_size
        self._lr_scaler = LearningRateScaler(optimizer, settings.learning_rate_factor)
        self.global_batch = 0
        """Samples of all ranks in the current step; 0 until the step requests micro-batches."""
        self.replica_weight = 1.0
        """This replica's samples in the current step, divided by the mean over all replicas."""
        self._total_steps: int | None = None
        self._step_discarded = False
        """Whether the current step was discarded."""
        self._coordinator.start()
        rng.restore(random())  # libraries that were imported here may have drawn from the program's generators

    def steps(self, total: int) -> Iterator[int]:
        """The numbers, from 1, of the remaining steps; `commit` each before taking the next."""
        self._total_steps = total
        self._coordinator.defer_sigterm()
        try:
            while True:
                try:
                    progress = TrainingProgress(self.step, self._samples)
                    self.step, self._samples = self._replicas.begin_step(progress, total=total)
                except StoppedWhileWaiting as alone:
                    self._save_and_exit(alone.progress)
                step = self.step + 1
                if step > total:
                    return
                self._step_discarded = False
                self._rank_verifier.begin_step(step, total)
                yield step
                if self.step != step and not self._step_discarded:
                    raise failure(
                        "step-not-committed",
                        f"step {step} ended with {self.step} steps committed",
                        exit_code=ExitCode.USAGE,
                        remedy="call session.commit(...) exactly once at the end of each step",
                    )
        finally:
            self._coordinator.finish_steps()

    @contextmanager
    def untimed(self) -> Generator[None]:
        """Suspends step timing during work such as an evaluation.

        The work counts as a hang only after ten times `recovery.step_timeout_s`, or ten minutes with `auto`. It may
        change weights and restore them: no checkpoint copy reads them meanwhile.
        """
        self._coordinator.set_activity(Activity.BETWEEN_STEPS)
        if self._checkpoints is not None:
            self._checkpoints.wait_copied()
        if self._peer_checkpointer is not None:
            self._peer_checkpointer.wait_copied()
        try:
            yield
        finally:
            self._coordinator.set_activity(Activity.STEPPING)

    def batches(self, data: Data) -> Iterator[Batch]:
        """This rank's micro-batches of the current step with their data, prefetched; see `micro_batches`."""
        first, plan = self._begin_step(data.batch_size, data.micro_batch_size)
        parts = self._shards(first, plan)
        loaded = (self._prefetcher.load(part, data, plan, first) for part in parts)
        yield from self._coordinator.meter.timed(loaded, name=type(data).__name__)

    def micro_batches(self, batch_size: int, *, micro_batch_size: int | None = None) -> Iterator[MicroBatch]:
        """This rank's samples of the current step, in micro-batches of at most `micro_batch_size`.

        `batch_size` is per rank when all ranks are present. With fewer ranks, each has more micro-batches
        (`recovery.global_batch: keep`), or the step has fewer samples (`scale`). Each sample is in exactly one
        committed step. DDP exchanges gradients only with the last micro-batch.
        """
        yield from self._shards(*self._begin_step(batch_size, micro_batch_size or batch_size))

    def _begin_step(self, batch_size: int, micro_batch_size: int) -> tuple[int, ShardPlan]:
        """The first sample of the current step, and the plan that shards its samples."""
        ranks, replicas = self._coordinator.ranks, self._replicas
        world_size = ranks.world_size * replicas.count
        self.global_batch = batch_size * (self._batch_world_size or world_size)
        if self._samples is None:
            self._samples = self.step * self.global_batch
        self._lr_scaler.apply()
        self._prefetcher.begin_step(self.global_batch, self._samples)
        first = ranks.world_size * replicas.replica_index
        plan = ShardPlan(
            global_batch=self.global_batch,
            micro_batch_size=micro_batch_size,
            rank=first + ranks.rank,
            world_size=world_size,
        )
        self.replica_weight = plan.weight_of(range(first, first + ranks.world_size))
        return self._samples, plan

    def _shards(self, first: int, plan: ShardPlan) -> Iterator[MicroBatch]:
        for part in plan.step(first):
            self._replicas.before_backward(last=part.is_last)
            yield part

    def before_backward(self, *, last: bool) -> None:
        """Announce a backward pass, for a loop that takes all micro-batches of a step before the first of these."""
        self._replicas.before_backward(last=last)

    def timed(self, source: Iterable[Item]) -> Iterator[Item]:
        """Yield the same items, such as a loader's batches; the wait for each is reported as data wait."""
        return self._coordinator.meter.timed(source)

    def commit(
        self, *, loss: SupportsFloat | None = None, tokens: SupportsFloat | None = None, **metrics: SupportsFloat
    ) -> None:
        """Report an optimizer step as finished; saves if a checkpoint is due, and exits on request.

        It exits with SystemExit(75), `ExitCode.CHECKPOINTED_AND_EXITED`: steps remain, so it is no success.

        `loss` is this rank's; `tokens` counts all ranks of all replicas in this step; other metrics are taken from
        rank 0. A step has at most 128 metrics. It does not wait until a GPU has finished this step: tensors on it are
        reported one step later, or immediately when a checkpoint is due, which must not follow a loss that is not
        finite.
        """
        samples, self.global_batch = self.global_batch, 0
        try:
            ended = self._replicas.end_step(
                TrainingProgress(self.step + 1, None if self._samples is None else self._samples + samples)
            )
        except StoppedWhileWaiting as alone:
            self._save_and_exit(alone.progress)
        if ended is None:
            self._step_discarded = True
            return
        self.step, self._samples = ended
        if self._saved_world_size:
            self._report_world_change()
        given = {"loss": loss, "tokens": tokens, "global_batch": samples or None, **self._replicas.metrics, **metrics}
        if self._checkpoints is not None:
            self._coordinator.add_stall(self._checkpoints.take_stalled_s())
        if self._peer_checkpointer is not None:
            self._coordinator.add_stall(self._peer_checkpointer.take_stalled_s())
            given["peer_checkpoint_s"] = self._peer_checkpointer.take_duration_s()
        self._coordinator.report_step(self.step, total=self._total_steps, metrics=given)
        if self._replay is not None and self._replay.is_over(self.step, self._total_steps):
            self._replay.leave_digest()
            self._coordinator.close()
            raise SystemExit(ExitCode.OK)
        action = self._coordinator.next_action(self.step, total=self._total_steps, stop=self._replicas.stopping)
        if self._coordinator.stop_together:
            self._replicas.request_stop()
        self._rank_verifier.end_step(saves=bool(action & _SAVES))
        if action is StepAction.TRANSFER_STATE and self._checkpoints is not None:
            action = self._transfer_state(self._checkpoints)
        if self._checkpoints is not None:
            # A step without a checkpoint never waits here, and is not worth the device's time for two marks.
            measured = self._on_host or action is not NOTHING
            with waiting_for_checkpoint(), self._save_stalls.waiting() if measured else nullcontext():
                self._save(self._checkpoints, action)
                if self._peer_checkpointer is not None:
                    self._peer_checkpoint(self._checkpoints, self._peer_checkpointer, action)
            self._coordinator.add_stall(self._save_stalls.take_s())
        self._coordinator.set_activity(Activity.STEPPING)
        if action is StepAction.STOP and self.step == self._total_steps:
            self._coordinator.close()
        elif action is StepAction.STOP:
            self._coordinator.exit_early(self.step)

    def _transfer_state(self, checkpoints: CheckpointManager) -> StepAction:
        """Transfer the state to the processes that replace these ranks and exit, or return the fallback action."""
        self._report_save(checkpoints.wait_saved(), required=False)
        if self._peer_checkpointer is not None:
            self._peer_checkpointer.wait_finished()
        problem = checkpoints.transfer_state(self.step, self._samples, node_s=self._coordinator.node_s)
        if problem is None:
            fast_exit.enable()
            self._coordinator.exit_early(self.step)
        self._coordinator.report_finding(problem)
        return StepAction.STOP

    def _save(self, checkpoints: CheckpointManager, action: StepAction) -> None:
        """Report the previous save once it has ended, and begin the next when it is due.

        One save runs at a time: on all ranks, a due save waits for the previous one, and a stop waits for its own.
        """
        if self._replicas.replica_index > 0:  # The first replica saves for all: they are equal, or soon synchronise.
            if StepAction.CHECKPOINT in action:
                self._coordinator.save_started()
            self._report_save(checkpoints.poll(), required=False)
            return
        if action is NOTHING or action is StepAction.PEER_CHECKPOINT:
            self._report_save(checkpoints.poll(), required=False)
            checkpoints.prepare()
            return
        self._report_save(checkpoints.wait_saved(), required=False)
        if self._coordinator.all_finite():
            self._coordinator.save_started()
            checkpoints.start_save(self.step, self._samples, node_s=self._coordinator.node_s)
        if action is StepAction.STOP:
            self._report_save(checkpoints.wait_saved(), required=True)
            self._report_problem(checkpoints.close(), required=True)

    def _save_and_exit(self, progress: TrainingProgress) -> NoReturn:
        """Save this rank's state and exit, without a consensus: it may be the only rank that has the state."""
        if self._checkpoints is not None and progress.step > 0:
            self._coordinator.set_activity(Activity.BETWEEN_STEPS)
            self._report_save(self._checkpoints.wait_saved(), required=False)
            if self._coordinator.all_finite():
                self._checkpoints.start_save(*progress, node_s=self._coordinator.node_s)
                self._report_save(self._checkpoints.wait_saved(), required=True)
            self._report_problem(self._checkpoints.close(), required=True)
        self._coordinator.exit_early(progress.step)

    def _peer_checkpoint(self, checkpoints: CheckpointManager, copies: PeerCheckpointer, action: StepAction) -> None:
        """Copy the state to another node's memory when due; a due copy waits for the previous one."""
        if action & StepAction.STOP:
            copies.wait_finished()
        elif not action & StepAction.PEER_CHECKPOINT:
            copies.prepare()
        else:
            if (result := copies.wait_finished()) is not None:
                self._report_problem(result.problem, required=False)
                self._report_problem(result.warning, required=False)
            if self._coordinator.all_finite():
                copies.start(checkpoints.new_manifest(self.step, self._samples, self._coordinator.node_s))

    def _report_save(self, saved: Saved | None, *, required: bool) -> None:
        if saved is None:
            return
        self._report_problem(saved.warning, required=False)
        if saved.problem is None:
            self._coordinator.checkpoint_committed(
                saved.step, saved.path, took_s=saved.took_s, size_bytes=saved.size_bytes
            )
            return
        refused = saved.problem.code in REFUSALS
        self._report_problem(saved.problem if refused else not_saved(saved.problem, last=required), required=required)

    def _report_problem(self, problem: Finding | None, *, required: bool) -> None:
        """Report a save's problem; raise if the save was required or another attempt owns the folder."""
        if problem is None:
            return
        fatal = required or problem.code in REFUSALS
        self._coordinator.report_finding(problem, fatal=fatal)
        if fatal:
            raise to_error(problem)

    def _resume(self) -> TrainingProgress:
        """Resume from the newest checkpoint, if there is one."""
        if self._checkpoints is None:
            return TrainingProgress(self.step, self._samples)
        random = rng.capture()
        self.step, findings, self._samples, node_s, where, saved_world_size = self._checkpoints.restore()
        if not self.step:
            rng.restore(random())  # as in __init__; of replicas this is called later
        self._coordinator.restore_node_s(node_s)
        for finding in findings:
            self._coordinator.report_finding(finding)
        world_size = self._coordinator.ranks.world_size
        if self.step and saved_world_size != world_size:
            self._saved_world_size = saved_world_size
            where += f", which {saved_world_size} took; the number of ranks is {world_size} now"
        if self.step:
            self._coordinator.log_resumed(self.step, where)
        return TrainingProgress(self.step, self._samples)

    def _agreed(self, step: int) -> None:
        """All replicas, or all ranks, are equal after this step: a checkpoint up to it is always kept."""
        if self._checkpoints is not None:
            self._checkpoints.keep_agreed(step)

    def _set_aside_after(self, step: int) -> None:
        """Set aside the checkpoints after this step, which a replica or rank that differs may have saved."""
        if self._checkpoints is not None:
            self._report_save(self._checkpoints.wait_saved(), required=False)
            self._checkpoints.set_aside_after(step)
        if self._peer_checkpointer is not None:
            self._peer_checkpointer.set_aside_after(step)

    def _report_world_change(self) -> None:
        """Report what a new world size changes; model, optimizer and the session's own data are unaffected."""
        rows = (
            (self._samples is None, "the loop takes its samples itself: see how many a step has, and which come next"),
            (
                len(self._train_state.state) > len(self._train_state.modules),
                "`state` is kept for each rank, except modules: a new rank has rank 0's",
            ),
        )
        saved_world_size, self._saved_world_size = self._saved_world_size, 0
        if evidence := tuple(words for holds, words in rows if holds):
            self._coordinator.report_finding(
                _world_size_changed(saved_world_size, self._coordinator.ranks.world_size, evidence)
            )


def _validate_state(state: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """The same objects; raises HoldfastError for a name or an object that cannot be saved."""
    for name, each in state.items():
        missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(each, method, None))]
        if missing or not _STATE_NAME.fullmatch(str(name)):
            raise failure(
                "session-state-invalid",
                f"state[{name!r}] cannot be saved",
                exit_code=ExitCode.USAGE,
                where="Session(state=...)",
                evidence=(f"{type(each).__name__} has no {' and no '.join(missing)}",)
                if missing
                else ("a name has letters, digits, `-` and `_` alone",),
                remedy="give objects that have state_dict and load_state_dict, by name: "
                'Session(state={"scaler": scaler})',
            )
    return dict(state)


def _make_storage(config: RankConfig, path: Path | str, ranks: ControlGroup) -> CheckpointStorage:
    """The checkpoint storage that the config names."""
    retention = RetentionPolicy(keep=config.checkpoint_keep, keep_every_steps=config.checkpoint_keep_every_steps)
    if config.checkpoint_local is None:
        storage = SharedStorage if config.replay_until is None else ReadOnlyStorage
        return storage(Path(path), retention=retention, ranks=ranks, writer=config.writer)
    remote = RemoteTier(str(path), config.writer)
    return TieredStorage(config.checkpoint_local, remote, retention=retention, ranks=ranks, replica=config.replica)


def _make_peer_checkpointer(
    config: RankConfig, train_state: TrainState, ranks: ControlGroup
) -> PeerCheckpointer | None:
    """The peer checkpointer that the config asks for; several replicas already back up each other."""
    if not config.peer_checkpoints or not config.peer_memory or config.replica_count > 1:
        return None
    return PeerCheckpointer(
        config.peer_memory, train_state=train_state, ranks=ranks, writer=config.writer, nodes=config.nodes
    )


def _world_size_changed(was: int, now: int, evidence: tuple[str, ...]) -> Finding:
    return Finding(
        code="world-size-changed",
        severity=Severity.WARNING,
        what=f"the checkpoint was taken by {was} ranks and {now} resume from it; not all state carries over",
        evidence=evidence,
        remedy="`Session.batches` and `micro_batches` deal samples to whatever ranks there are",
    )
