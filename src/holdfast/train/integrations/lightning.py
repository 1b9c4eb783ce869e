"""Lightning callback: reports steps, saves when due, commits the checkpoints, and exits on request.

The checkpoint is Lightning's own file, plus what Lightning leaves out: each rank's random state and the position of its
loader.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TypedDict, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DistributedSampler, SequentialSampler

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding, Severity
from holdfast.protocol.rank_messages import Activity
from holdfast.train.checkpoint import manifest_file, rng, safe_state
from holdfast.train.checkpoint.hyperparam_overrides import HyperparamOverrides
from holdfast.train.checkpoint.hyperparams import hyperparameters_changed, optimizer_changed, optimizer_mismatch
from holdfast.train.checkpoint.storage import require_checkpoint
from holdfast.train.checkpoint.train_state import Stateful, TrainState
from holdfast.train.integrations.checkpoint_dir import CheckpointDir, LatestCheckpoint
from holdfast.train.integrations.checkpoint_finalizer import CheckpointFinalizer
from holdfast.train.integrations.lightning_private import training_loaders
from holdfast.train.session.control_group import StepAction
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.rank_coordinator import RankCoordinator

MODEL = "lightning.ckpt"
"""Lightning's checkpoint: a file, or a folder with some strategies."""


class _LightningRankState(TypedDict):
    """A rank's own state."""

    random: rng.RandomState
    loader: dict[str, Any] | None
    """None at the end of an epoch: the next one begins."""


class HoldfastCallback(Callback):
    """Connects a Lightning Trainer to holdfast.

    Works the same under holdfast, under torchrun and in a bare `python train.py`.

    ::

        holdfast = HoldfastCallback()
        trainer = Trainer(callbacks=[holdfast])
        trainer.fit(module, StatefulDataLoader(...), ckpt_path=holdfast.resume_path)
    """

    resume_path: str | None = None
    """The newest good checkpoint in the job's folder, for `ckpt_path`; None if there is none."""

    def __init__(self) -> None:
        """Find the newest checkpoint; every rank does so itself, since there is no process group yet."""
        self._config = RankConfig.from_env()
        self._config.refuse_unsupported()
        self._checkpoint_dir: CheckpointDir | None = None
        self._latest = LatestCheckpoint(None, None, [])
        if (folder := self._config.shared_folder()) is not None:
            self._checkpoint_dir = CheckpointDir(folder, writer=self._config.writer, keep=self._config.checkpoint_keep)
            self._latest = self._checkpoint_dir.latest(world_size=self._config.world_size)
            require_checkpoint(self._latest.step, self._config.resumed_step, str(folder))
            self.resume_path = None if self._latest.path is None else str(self._latest.path / MODEL)
        self._step = 0
        self._loading: dict[str, Any] = {}
        """The checkpoint that Lightning is about to load."""
        self._rank_state: _LightningRankState | None = None
        """The state to resume from, once there is a loader."""
        self._action = StepAction.NOTHING
        """The action for all ranks, at the next point from which Lightning can resume."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._coordinator = RankCoordinator(self._config)
        self._finalizer = (
            None if self._checkpoint_dir is None else CheckpointFinalizer(self._coordinator, self._checkpoint_dir)
        )
        self._refuse_different_starts()
        for finding in self._latest.findings:
            self._coordinator.report_finding(finding)
        self._coordinator.restore_node_s(self._latest.node_s)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loading = checkpoint

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The optimizer exists, and its state is not loaded yet.
        loading, self._loading = self._loading, {}
        if self._finalizer is None or len(trainer.optimizers) != 1:
            return
        (optimizer,), schedulers = trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs]
        program = HyperparamOverrides(
            TrainState(model=pl_module, optimizer=optimizer, scheduler=next(iter(schedulers), None))
        )
        self._finalizer.hyperparams = program.hyperparams
        manifest = self._latest.manifest
        if manifest is None or manifest.hyperparams is None or trainer.ckpt_path != self.resume_path:
            return
        if (why := optimizer_mismatch(manifest.hyperparams, program.hyperparams)) is not None:
            raise optimizer_changed(manifest.step, str(self.resume_path), why)
        ((state,), stood) = loading["optimizer_states"], loading["lr_schedulers"]
        changed, instead = program.override(state["param_groups"], next(iter(stood), None), manifest.hyperparams)
        stood[:] = [instead, *stood[1:]] if stood else []
        if changed:
            self._coordinator.report_finding(hyperparameters_changed(manifest.step, str(self.resume_path), changed))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step = state_dict["step"]
        if self._checkpoint_dir is not None:
            folder = self._checkpoint_dir.path(self._step)
            own = folder / manifest_file.rank_file(self._coordinator.ranks.rank)
            self._rank_state = safe_state.load(own if own.exists() else folder / manifest_file.rank_file(0))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        self._total = int(total) if total != float("inf") else None
        if self._checkpoint_dir is not None and (why := _not_bit_exact(trainer)) is not None:
            self._coordinator.report_finding(why)
        if self._rank_state is not None:
            self._coordinator.log_resumed(self._step, str(self.resume_path))
            _restore_position(trainer, self._rank_state)
            self._rank_state = None
        self._coordinator.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # still accumulating gradients
        step = self._step = trainer.global_step
        loss = cast("dict[str, Any]", outputs).get("loss") if isinstance(outputs, dict) else outputs
        metrics: dict[str, Any] = {**trainer.logged_metrics, "loss": loss}
        self._coordinator.report_step(step, total=self._total, metrics=metrics)
        self._action = self._coordinator.next_action(step, total=self._total)
        if not trainer.is_last_batch:
            self._act(trainer, epoch_ended=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._coordinator.set_activity(Activity.BETWEEN_STEPS)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Only from here can Lightning resume with the next epoch: from its last batch it would repeat the epoch.
        self._act(trainer, epoch_ended=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._finalizer is not None:
            self._finalizer.wait()
        self._coordinator.close()

    def _act(self, trainer: Trainer, *, epoch_ended: bool) -> None:
        action, self._action = self._action, StepAction.NOTHING
        stopping = action is StepAction.STOP and self._step != self._total
        if self._checkpoint_dir is not None and self._finalizer is not None:
            if action is StepAction.NOTHING:
                self._finalizer.poll()
            elif self._coordinator.all_finite():
                self._finalizer.wait()
                self._save(trainer, self._checkpoint_dir, self._finalizer, epoch_ended=epoch_ended)
            if stopping:
                self._finalizer.wait(required=True)
        if stopping:
            self._coordinator.exit_early(self._step)

    def _save(
        self, trainer: Trainer, checkpoint_dir: CheckpointDir, finalizer: CheckpointFinalizer, *, epoch_ended: bool
    ) -> None:
        began = time.monotonic()
        folder = checkpoint_dir.path(self._step)
        folder.mkdir(parents=True, exist_ok=True)
        _write(trainer, folder / MODEL)
        loader = None if epoch_ended or _not_bit_exact(trainer) else cast("Stateful", trainer.train_dataloader)
        own = _LightningRankState(random=rng.capture()(), loader=None if loader is None else loader.state_dict())
        written = safe_state.to_bytes(own)
        if found := safe_state.unsafe_types(written):
            raise safe_state.unsafe_state("the loader of trainer.fit", found)
        (folder / manifest_file.rank_file(self._coordinator.ranks.rank)).write_bytes(written)
        finalizer.start(self._step, began=began)

    def _refuse_different_starts(self) -> None:
        """Raise unless every rank has found the same checkpoint."""
        ranks = self._coordinator.ranks
        found = ranks.broadcast(ranks.gather(self.resume_path))
        if len(set(found)) > 1:
            raise failure(
                "ranks-found-different-checkpoints",
                "the ranks do not see the same checkpoints",
                exit_code=ExitCode.CANNOT_RUN_HERE,
                where=str(self._config.checkpoint_path),
                evidence=tuple(f"rank {rank}: {path or 'none'}" for rank, path in enumerate(found)),
                remedy="set `checkpoint.path` in the job to a folder that all nodes share",
            )


def _write(trainer: Trainer, file: Path) -> None:
    """Have Lightning write its checkpoint synchronously: files still being written cannot be committed."""
    strategy, given = trainer.strategy, trainer.strategy.checkpoint_io
    if isinstance(given, AsyncCheckpointIO) and given.checkpoint_io is not None:
        strategy.checkpoint_io = given.checkpoint_io
    try:
        trainer.save_checkpoint(file)
    finally:
        strategy.checkpoint_io = given


def _restore_position(trainer: Trainer, own: _LightningRankState) -> None:
    """Restore the position of the loader and the random state.

    Lightning creates the loader's iterator before it sets the sampler's epoch (2.6), so that a later epoch would have
    the first one's order; and it saves only rank 0's loader. So this creates the iterator again. That draws a random
    number, which an uninterrupted training does at the beginning of an epoch, not in the middle.
    """
    loaders, restart = training_loaders(trainer)
    if own["loader"] is None:
        rng.restore(own["random"])
    for loader in loaders:
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(trainer.current_epoch)
        if own["loader"] is not None:
            loader.load_state_dict(own["loader"])
    restart()
    if own["loader"] is not None:
        rng.restore(own["random"])


def _not_bit_exact(trainer: Trainer) -> Finding | None:
    """Finding for a loader whose position in an epoch cannot be known."""
    loader = trainer.train_dataloader
    sampler = getattr(loader, "sampler", None)
    if not hasattr(loader, "state_dict"):
        why = f"a {type(loader).__name__} does not tell which samples it has given"
    elif trainer.num_training_batches == float("inf"):
        why = "of a loader without a length, Lightning takes a batch more than it trains on"
    elif not _keeps_order(sampler):
        why = f"a {type(sampler).__name__} makes an order that is not kept"
    else:
        return None
    return Finding(
        code="loader-resume-not-bit-exact",
        severity=Severity.WARNING,
        what="in the middle of an epoch, training cannot resume exactly where it was",
        evidence=(why,),
        remedy="give trainer.fit() one torchdata StatefulDataLoader, of a dataset with a length, and with a "
        "DistributedSampler of your own (use_distributed_sampler=False); at an epoch's end any will do",
    )


def _keeps_order(sampler: object) -> bool:
    """Whether the order follows from the epoch, or is in the loader's own state.

    Over several ranks Lightning wraps unknown samplers, including torchdata's, and loses their state.
    """
    if type(sampler) in (SequentialSampler, DistributedSampler):
        return True
    return type(sampler).__module__.startswith("torchdata.")
