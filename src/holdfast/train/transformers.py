"""Owns a callback for the Trainer of `transformers`: it reports, asks for saves, seals them, and leaves when told to.

The checkpoint is the Trainer's own, in its `output_dir`, with a seal; what it holds and how long it is kept is the
Trainer's affair, and so are the data and the random numbers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from holdfast.errors import ExitCode, failure
from holdfast.events.rank import Doing
from holdfast.findings import Finding, Severity
from holdfast.train.arguments import configured, enforce
from holdfast.train.configured import another_optimizer, changes, hyperparameters_changed, optimizer_changed
from holdfast.train.environment import Environment
from holdfast.train.liaison import Liaison
from holdfast.train.ranks import Wish
from holdfast.train.sealer import Sealer
from holdfast.train.shelf import Shelf


class _Inexact(NamedTuple):
    """An argument of the Trainer's, and what it takes from a resumed training."""

    argument: str
    value: Any
    loss: str


INEXACT = (
    _Inexact("save_only_model", True, "the optimiser and the random numbers are not saved, so none can be resumed"),
    _Inexact("ignore_data_skip", True, "samples that were trained on before come again"),
    _Inexact("save_total_limit", 1, "the last good checkpoint is removed before the next is sealed"),
)


class HoldfastCallback(TrainerCallback):
    """Ties a Trainer to holdfast; the same under holdfast, under torchrun and in a bare `python train.py`.

    ::

        holdfast = HoldfastCallback()
        trainer = Trainer(model, args, train_dataset=dataset, callbacks=[holdfast])
        trainer.train(resume_from_checkpoint=holdfast.newest)

    Checkpoints are due when the Trainer's arguments say so, when the job does, and when one is asked for.
    """

    newest: str | None = None
    """The newest good checkpoint in the Trainer's `output_dir`, once the Trainer is made; None where there is none."""

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        told = Environment.read()
        told.refuse_replicas()
        if args.world_size != told.world_size:
            raise failure(
                "trainer-without-its-ranks",
                f"the Trainer counts {args.world_size} ranks, but {told.world_size} were started",
                exit_code=ExitCode.USAGE,
                evidence=("every rank would train a model of its own",),
                remedy="on CPUs say use_cpu=True and ddp_backend='gloo' in the TrainingArguments",
            )
        self._liaison = Liaison(told)
        ranks = self._liaison.ranks
        shelf = Shelf(Path(args.output_dir or "."), writer=told.writer)
        self._sealer = Sealer(self._liaison, shelf)
        found = ranks.on_first(lambda: shelf.newest(world_size=ranks.world_size))
        for finding in (*found.noticed, *_inexact(args)):
            self._liaison.found(finding)
        self._liaison.resume(found.node_s)
        self.newest = None if found.path is None else str(found.path)
        self._resumed = found.sealed
        if kwargs.get("optimizer") is None:  # else the arguments say nothing of it
            self._sealer.configured = configured(args, kwargs["model"])
            self._refuse_another_optimizer()
        self._stopping = False
        self._unreported: int | None = None
        """A step whose loss the Trainer is about to log."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._resumed is not None and self._resumed.step == state.global_step:
            self._liaison.resumed(state.global_step, str(self.newest))
        self._say_what_holds(state.global_step, **kwargs)
        self._liaison.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._report(state)  # where the Trainer did not log after all, because another callback said so
        self._unreported = state.global_step
        if not control.should_log:
            self._report(state)
        wish = self._liaison.wish(state.global_step, total=state.max_steps)
        if wish is not Wish.NOTHING and self._liaison.sound():
            control.should_save = True
        self._before_saving(control)
        if wish is Wish.STOP and state.global_step < state.max_steps:
            self._stopping = control.should_training_stop = True

        if control.should_evaluate:
            self._liaison.turn(Doing.ASIDE)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._before_saving(control)
        if control.should_evaluate:
            self._liaison.turn(Doing.ASIDE)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._began = time.monotonic()  # the Trainer saves after it has evaluated

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
        self._sealer.begin(state.global_step, began=self._began)
        if self._stopping:
            self._sealer.finish(must=True)
            self._liaison.leave(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._sealer.finish()
        if self._stopping:  # and the Trainer would not save, for it keeps only what evaluates best
            self._liaison.leave(state.global_step)
        self._liaison.end()

    def _refuse_another_optimizer(self) -> None:
        """Before the Trainer loads the state of the one into the other, which may well succeed."""
        sealed, now = self._resumed, self._sealer.configured
        if sealed is None or sealed.configured is None or now is None:
            return
        if (why := another_optimizer(sealed.configured, now)) is not None:
            raise optimizer_changed(sealed.step, str(self.newest), why)

    def _say_what_holds(self, step: int, *, optimizer: Any, lr_scheduler: Any, **_: Any) -> None:
        sealed, now = self._resumed, self._sealer.configured
        if sealed is None or sealed.configured is None or now is None or sealed.step != step:
            return
        if changed := changes(sealed.configured, now):
            enforce(optimizer, lr_scheduler, sealed.configured, now)
            self._liaison.found(hyperparameters_changed(step, str(self.newest), changed))

    def _before_saving(self, control: TrainerControl) -> None:
        """The Trainer saves after this, where it is to: it must not change files that are being sealed."""
        if control.should_save:
            self._sealer.finish()
        else:
            self._sealer.look()
        self._began = time.monotonic()

    def _report(self, state: TrainerState, logs: dict[str, Any] | None = None) -> None:
        if self._unreported is not None:
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
            self._liaison.report(self._unreported, total=state.max_steps, metrics=numbers)
            self._unreported = None


def _inexact(args: TrainingArguments) -> list[Finding]:
    """What is to be said of arguments with which a resumed training is not what an unbroken one is."""
    rows = [row for row in INEXACT if getattr(args, row.argument) == row.value]
    if not rows:
        return []
    return [
        Finding(
            code="trainer-resumes-inexactly",
            severity=Severity.WARNING,
            what="with these arguments of the Trainer, training cannot go on exactly where it was",
            evidence=tuple(f"{row.argument}={row.value}: {row.loss}" for row in rows),
            remedy="leave them out of the TrainingArguments, unless that is what you want",
        )
    ]
