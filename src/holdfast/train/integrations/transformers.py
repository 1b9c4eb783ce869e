"""Callback for the Trainer of `transformers`: reports steps, requests saves, commits them, and exits on request.

The checkpoint is the Trainer's own, in its `output_dir`, plus a manifest; its content and retention, the data and the
random state are the Trainer's responsibility.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding, Severity
from holdfast.protocol.rank_messages import Activity
from holdfast.train.checkpoint.hyperparams import diff, hyperparameters_changed, optimizer_changed, optimizer_mismatch
from holdfast.train.checkpoint.storage import require_checkpoint
from holdfast.train.integrations.checkpoint_dir import CheckpointDir
from holdfast.train.integrations.checkpoint_finalizer import CheckpointFinalizer
from holdfast.train.integrations.trainer_arguments import apply_changes, hyperparams_from
from holdfast.train.session.control_group import StepAction
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.rank_coordinator import RankCoordinator


class _NotBitExact(NamedTuple):
    """A Trainer argument that prevents an exact resume, and what is lost."""

    argument: str
    value: Any
    loss: str


NOT_BIT_EXACT = (
    _NotBitExact("save_only_model", True, "the optimizer and the random numbers are not saved, so none can be resumed"),
    _NotBitExact("ignore_data_skip", True, "samples that were trained on before come again"),
    _NotBitExact("save_total_limit", 1, "the last good checkpoint is removed before the next is committed"),
)


class HoldfastCallback(TrainerCallback):
    """Connects a Trainer to holdfast.

    Works the same under holdfast, under torchrun and in a bare `python train.py`.

    ::

        holdfast = HoldfastCallback()
        trainer = Trainer(model, args, train_dataset=dataset, callbacks=[holdfast])
        trainer.train(resume_from_checkpoint=holdfast.resume_path)

    Saves when the Trainer's arguments or the job require it, and on request.
    """

    resume_path: str | None = None
    """The newest good checkpoint in the Trainer's `output_dir`, once the Trainer exists; None if there is none."""

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        config = RankConfig.from_env()
        config.refuse_unsupported()
        if args.world_size != config.world_size:
            raise failure(
                "trainer-not-distributed",
                f"the Trainer counts {args.world_size} ranks, but {config.world_size} were started",
                exit_code=ExitCode.USAGE,
                evidence=("every rank would train a separate model",),
                remedy="on CPUs say use_cpu=True and ddp_backend='gloo' in the TrainingArguments",
            )
        self._coordinator = RankCoordinator(config)
        ranks = self._coordinator.ranks
        checkpoint_dir = CheckpointDir(Path(args.output_dir or "."), writer=config.writer)
        self._finalizer = CheckpointFinalizer(self._coordinator, checkpoint_dir)
        found = ranks.run_on_first(lambda: checkpoint_dir.latest(world_size=ranks.world_size))
        for finding in (*found.findings, *_not_bit_exact(args)):
            self._coordinator.report_finding(finding)
        require_checkpoint(found.step, config.resumed_step, str(checkpoint_dir.folder))
        self._coordinator.restore_node_s(found.node_s)
        self.resume_path = None if found.path is None else str(found.path)
        self._resume_manifest = found.manifest
        if kwargs.get("optimizer") is None:  # else the arguments do not describe it
            self._finalizer.hyperparams = hyperparams_from(args, kwargs["model"])
            self._refuse_another_optimizer()
        self._stopping = False
        self._unreported: int | None = None
        """A step whose loss the Trainer is about to log."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._resume_manifest is not None and self._resume_manifest.step == state.global_step:
            self._coordinator.log_resumed(state.global_step, str(self.resume_path))
        self._apply_hyperparams(state.global_step, **kwargs)
        self._coordinator.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._report(state)  # another callback has stopped the Trainer from logging
        self._unreported = state.global_step
        if not control.should_log:
            self._report(state)
        action = self._coordinator.next_action(state.global_step, total=state.max_steps)
        if action is not StepAction.NOTHING and self._coordinator.all_finite():
            control.should_save = True
        self._before_save(control)
        if action is StepAction.STOP and state.global_step < state.max_steps:
            self._stopping = control.should_training_stop = True

        if control.should_evaluate:
            self._coordinator.set_activity(Activity.BETWEEN_STEPS)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._before_save(control)
        if control.should_evaluate:
            self._coordinator.set_activity(Activity.BETWEEN_STEPS)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._save_began = time.monotonic()  # the Trainer saves after its evaluation

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._report(state, logs or {})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._finalizer.start(state.global_step, began=self._save_began)
        if self._stopping:
            self._finalizer.wait(required=True)
            self._coordinator.exit_early(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._finalizer.wait()
        if self._stopping:  # the Trainer would not save: it keeps only the best evaluated checkpoint
            self._coordinator.exit_early(state.global_step)
        self._coordinator.close()

    def _refuse_another_optimizer(self) -> None:
        """Raise before the Trainer loads one optimizer's state into another, which may even succeed."""
        manifest, now = self._resume_manifest, self._finalizer.hyperparams
        if manifest is None or manifest.hyperparams is None or now is None:
            return
        if (why := optimizer_mismatch(manifest.hyperparams, now)) is not None:
            raise optimizer_changed(manifest.step, str(self.resume_path), why)

    def _apply_hyperparams(self, step: int, *, optimizer: Any, lr_scheduler: Any, **_: Any) -> None:
        manifest, now = self._resume_manifest, self._finalizer.hyperparams
        if manifest is None or manifest.hyperparams is None or now is None or manifest.step != step:
            return
        if changed := diff(manifest.hyperparams, now):
            apply_changes(optimizer, lr_scheduler, manifest.hyperparams, now)
            self._coordinator.report_finding(hyperparameters_changed(step, str(self.resume_path), changed))

    def _before_save(self, control: TrainerControl) -> None:
        """Wait for the last commit before the Trainer saves: it must not change files that are being committed."""
        if control.should_save:
            self._finalizer.wait()
        else:
            self._finalizer.poll()
        self._save_began = time.monotonic()

    def _report(self, state: TrainerState, logs: dict[str, Any] | None = None) -> None:
        if self._unreported is not None:
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
            self._coordinator.report_step(self._unreported, total=state.max_steps, metrics=numbers)
            self._unreported = None


def _not_bit_exact(args: TrainingArguments) -> list[Finding]:
    """Findings for arguments with which a resumed training differs from an uninterrupted one."""
    rows = [row for row in NOT_BIT_EXACT if getattr(args, row.argument) == row.value]
    if not rows:
        return []
    return [
        Finding(
            code="trainer-resume-not-bit-exact",
            severity=Severity.WARNING,
            what="with these arguments of the Trainer, training cannot resume exactly where it was",
            evidence=tuple(f"{row.argument}={row.value}: {row.loss}" for row in rows),
            remedy="leave them out of the TrainingArguments, unless that is what you want",
        )
    ]
