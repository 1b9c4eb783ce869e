"""TorchTitan's Trainer with a Session around its loop, which stays as it is.

Its loop asks for the next step, for batches, and for a checkpoint after each step: these calls are the Session's steps
and commits. Checkpoints that the job configures are holdfast's and exact; those of TorchTitan's own `--checkpoint`
remain available, for its exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.metrics import BaseLogger
from torchtitan.components.validate import BaseValidator
from torchtitan.experiments.torchft.config import FaultTolerance
from torchtitan.trainer import Trainer

from holdfast.train.checkpoint import rng
from holdfast.train.integrations import titan_cpu, titan_private
from holdfast.train.integrations.titan_data import Given, LoaderPosition, SampleDealer
from holdfast.train.integrations.titan_limits import (
    own_checkpoint_unsupported,
    refuse_elastic,
    refuse_unsupported,
    with_outer_sync,
)
from holdfast.train.integrations.titan_state import parameter_tree
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.session import Session


class HoldfastTrainer(Trainer):
    """TorchTitan's Trainer inside a holdfast run, under torchrun, or alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """TorchTitan's settings; holdfast's come from the job."""

        fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
        """Of these, `semi_sync_method` and `sync_steps` count; who the replicas are is the job's."""

    def __init__(self, config: Config) -> None:
        # Before TorchTitan changes variables that holdfast has set, such as where flight recorders dump to.
        self._rank_config = with_outer_sync(RankConfig.from_env(), config.fault_tolerance)
        refuse_elastic(self._rank_config)
        super().__init__(config)
        refuse_unsupported(self, self._rank_config)
        if titan_cpu.ON_CPU:
            titan_cpu.adjust_model(self.model_parts[0])
        self._session: Session | None = None
        self._steps: Iterator[int] = iter(())
        self._loss: torch.Tensor | None = None
        """This rank's part of the current step's loss."""
        self._dealer: SampleDealer | None = None
        self._dealt: list[Given] = []
        """Micro-batches of the current step, if replicas share the samples."""
        self._passes = self._seen_before = self._began = 0
        """Backward passes of the current step, tokens seen before it, and its number."""
        if self._rank_config.replica_count > 1:
            batch_size = self.gradient_accumulation_steps * config.training.local_batch_size
            self._dealer = SampleDealer(
                titan_private.whole_dataset(self),
                batch_size=batch_size,
                micro_batch_size=config.training.local_batch_size,
            )
        self._logged = self.metrics_processor.logger = LoggedNumbers(self.metrics_processor.logger)
        self.checkpointer = cast("BaseCheckpointManager", _Checkpointer(self, self.checkpointer))
        if config.validator.enable:
            self.validator = cast("BaseValidator", _UntimedValidator(self, self.validator))

    # Calls of TorchTitan's loop, in their order

    def resume(self) -> bool:
        """Make the Session, which loads the newest checkpoint; returns whether there was one."""
        model, optimizer = titan_private.only_model(self), titan_private.only_optimizer(self)
        assert model is not None
        assert optimizer is not None
        shards = titan_private.data_parallel_size(self)
        # Samples that are dealt have their position in the Session.
        position = {} if self._dealer else {"loader": LoaderPosition(self.dataloader, shards)}
        self._session = session = Session(
            model=parameter_tree(model),
            optimizer=optimizer,
            scheduler=titan_private.only_scheduler(self),
            state={"tokens": _TokensSeen(self), **position},
            config=self._rank_config,
            flops_per_token=titan_private.flops_per_token(self.metrics_processor),
            sequence_length=self.config.training.seq_len,
        )
        self.step = session.step
        self._steps = session.steps(self.config.training.steps)
        return session.step > 0

    def begin_at(self, step: int) -> None:
        """Continue after a step that TorchTitan's own checkpoint has restored; 0 if only weights were loaded."""
        assert self._session is not None
        if step > 0 and self._dealer is not None:
            raise own_checkpoint_unsupported(step)
        self._session.step = step

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """TorchTitan's batches; the waits for them are reported."""
        assert self._session is not None
        if self._dealer is not None:
            yield from super().batch_generator(self._take_dealt())
            return
        random = rng.capture()
        batches = iter(data_iterable)
        if self._session.step > 0:  # a loader draws a seed when it starts, which an unfailed run did only once
            rng.restore(random())
        yield from super().batch_generator(self._session.timed(batches))

    def should_continue_training(self) -> bool:
        """Begin the Session's next step, if there is one."""
        step = next(self._steps, None)
        if step is None:
            return False
        self.step, self._loss, self._passes = step - 1, None, 0
        if self._dealer is not None:
            assert self._session is not None
            if step == self._began:  # discarded, and repeated
                self.ntokens_seen = self._seen_before
            self._began, self._seen_before = step, self.ntokens_seen
            self._dealt = self._dealer.deal(self._session)
            self.gradient_accumulation_steps = len(self._dealt)
        return True

    def _take_dealt(self) -> Iterator[Given]:
        while True:
            yield from self._dealt

    def forward_backward_step(self, *, global_valid_tokens: torch.Tensor, **given: Any) -> torch.Tensor:
        """TorchTitan's pass over a micro-batch; its loss is kept for the step's report."""
        if self._dealer is not None:
            assert self._session is not None
            self._passes += 1
            self._session.before_backward(last=self._passes == self.gradient_accumulation_steps)
            # TorchTitan takes the mean over this replica's tokens, and then the replicas' gradients are averaged.
            global_valid_tokens = global_valid_tokens / self._session.replica_weight
        loss = super().forward_backward_step(global_valid_tokens=global_valid_tokens, **given)
        # A graph of CUDA's owns the loss, and overwrites it in the next pass.
        self._loss = loss.detach().clone() if self._loss is None else self._loss + loss.detach()
        return loss

    def commit(self) -> None:
        """Report the step as finished; saves if a checkpoint is due, and exits on request."""
        assert self._session is not None
        samples = self._session.global_batch or self._own_batch
        self._session.commit(
            # Each rank has its part of a mean over all tokens.
            loss=None if self._loss is None else self._loss * titan_private.loss_shards(self),
            tokens=samples * self.config.training.seq_len,
            **self._logged.take(),
        )

    @property
    def _own_batch(self) -> int:
        """Samples of a step with TorchTitan's own loader."""
        shards = titan_private.data_parallel_size(self)
        return self.gradient_accumulation_steps * self.config.training.local_batch_size * shards

    @property
    def opened(self) -> bool:
        """Whether there is a Session: for a seed checkpoint, which no training follows, there is none."""
        return self._session is not None

    @property
    def exports(self) -> bool:
        """Whether TorchTitan's own checkpoints are written here.

        Replicas would write the same files; steps that are repeated on other nodes, for comparison, leave no trace.
        """
        return self._rank_config.replica == 0 and self._rank_config.replay_until is None

    def untimed(self) -> AbstractContextManager[None]:
        """A context for work between two steps."""
        return self._session.untimed() if self._session is not None else nullcontext()

    def close(self) -> None:
        """End the Session's steps, and close what TorchTitan closes."""
        if self._session is not None:
            cast("Any", self._steps).close()
        super().close()


class _UntimedValidator:
    """TorchTitan's validation, which counts as no part of a step."""

    def __init__(self, trainer: HoldfastTrainer, own: BaseValidator) -> None:
        self._trainer, self._own = trainer, own

    def should_validate(self, step: int) -> bool:
        return self._own.should_validate(step)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        with self._trainer.untimed():
            self._own.validate(model_parts, step)


class LoggedNumbers(BaseLogger):
    """Passes on what TorchTitan logs, and keeps it for the report of the step."""

    def __init__(self, then: BaseLogger) -> None:
        self._then = then
        self._numbers: dict[str, float] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Keep these numbers until they are taken."""
        self._numbers |= metrics
        self._then.log(metrics, step)

    def take(self) -> dict[str, float]:
        """The numbers since the last call, under TorchTitan's names."""
        taken, self._numbers = self._numbers, {}
        return taken

    def close(self) -> None:
        """Close the loggers that write."""
        self._then.close()


class _Checkpointer:
    """What TorchTitan's loop sees as its checkpointer: the Session, and TorchTitan's own if it is on."""

    def __init__(self, trainer: HoldfastTrainer, own: BaseCheckpointManager) -> None:
        self._trainer, self._own = trainer, own

    def load(self, step: int = -1) -> bool:
        if self._trainer.resume():
            return True
        if not self._own.load(step):
            return False
        self._trainer.begin_at(self._trainer.step)
        return True

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._trainer.opened:
            self._trainer.commit()
        if not self._trainer.exports:
            return False
        with self._trainer.untimed():
            return self._own.save(curr_step, last_step)

    def maybe_wait_for_staging(self) -> None:
        self._own.maybe_wait_for_staging()

    def close(self) -> None:
        self._own.close()


class _TokensSeen:
    """TorchTitan's count of tokens, for the Session's state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._trainer.ntokens_seen}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._trainer.ntokens_seen = state["seen"]
