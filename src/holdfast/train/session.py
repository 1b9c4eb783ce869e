"""Owns a rank's life from first step to last: what was finished is reported, saved when due, and left when asked.

Works alike under holdfast, under torchrun and in a bare `python train.py`. Refuses to own the loop (the user's), the
files (checkpoint.py), the agreement between ranks (ranks.py) and the wire (channel.py).
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import SupportsFloat

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.clock import Clock
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events.bounds import METRICS
from holdfast.events.rank import Checkpointed, CheckpointNow, Hello, Step
from holdfast.train.batches import MicroBatch, deal
from holdfast.train.channel import Channel, say
from holdfast.train.checkpoint import Checkpoints, Stateful, Training
from holdfast.train.environment import Environment
from holdfast.train.ranks import Agreement, Ranks, Wish
from holdfast.train.rate import ScaledRate
from holdfast.train.tenure import SUPERSEDED, Writer

DRAIN_S = 0.05
"""Seconds a process waits when it exits, with Python's lock let go. A Gloo thread that is about to drop the tensors of
the last collective needs that lock; one that is still waiting for it when the interpreter ends aborts the process
(pytorch pull request 179291), and a run that had finished would have failed."""

Handler = Callable[[int, FrameType | None], object] | int | None


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
        extra: Stateful | None = None,
        environment: Environment | None = None,
    ) -> None:
        """Resume from the newest complete checkpoint, if there is one; called by every rank, after init_process_group.

        `extra` is anything of the user's with a state_dict, kept per rank. `environment` replaces what the process
        was told through its variables.
        """
        told = environment or Environment.read()
        self.step = 0
        """Optimiser steps finished so far, those before a restart included."""
        self._samples: int | None = None
        """Samples that those steps took; not known of a loop that never asked for micro-batches."""
        self._channel = Channel.open(told.rank_socket, rank=told.rank)
        self._clock = Clock()
        self._channel.send(Hello(rank=told.rank, pid=os.getpid(), clock=self._clock.anchor))
        self._ranks = Ranks.join(announced=told.world_size)
        self._agreement = Agreement(self._ranks)
        self._every_steps, self._every_s = told.checkpoint_every_steps, told.checkpoint_every_s
        self._checkpoints: Checkpoints | None = None
        if told.checkpoint_path is not None:
            training = Training(model=model, optimizer=optimizer, scheduler=scheduler, extra=extra)
            self._checkpoints = Checkpoints(
                told.checkpoint_path,
                keep=told.checkpoint_keep,
                training=training,
                ranks=self._ranks,
                writer=Writer(run=told.run, replica=told.replica, attempt=told.attempt),
            )
            self._resume(self._checkpoints)
        self._model = model
        self._batch_ranks = told.batch_world_size or self._ranks.world_size
        self._rate = ScaledRate(optimizer, told.learning_rate_factor)
        self.global_batch = 0
        """Samples that all ranks take in the step in hand; 0 until it has asked for micro-batches."""
        self._total: int | None = None
        self._terminated = False
        self._previous_sigterm = _on_sigterm(self._note_sigterm)
        atexit.register(time.sleep, DRAIN_S)
        self._saved_at = time.monotonic()
        self._boundary = self._clock()
        self._waited_s = 0.0

    def steps(self, total: int) -> Iterator[int]:
        """The numbers, from 1, of the steps still to be done; each is `commit`ted before the next is taken."""
        self._total = total
        for step in range(self.step + 1, total + 1):
            yield step
            if self.step != step:
                raise failure(
                    "step-not-committed",
                    f"step {step} ended with {self.step} steps committed",
                    exit_code=ExitCode.USAGE,
                    remedy="call session.commit(...) exactly once at the end of each step",
                )

    def micro_batches(self, batch: int) -> Iterator[MicroBatch]:
        """This rank's samples of the step in hand, `batch` at a time: where all ranks are there, that is all of them.

        With fewer ranks each has more micro-batches (`recovery.global_batch: keep`), or the step has fewer samples
        (`scale`). Each sample is in exactly one committed step. DDP exchanges gradients with the last of them only.
        """
        self.global_batch = batch * self._batch_ranks
        if self._samples is None:
            self._samples = self.step * self.global_batch
        self._rate.apply()
        for part in deal(range(self._samples, self._samples + self.global_batch), batch, self._ranks):
            if isinstance(self._model, DistributedDataParallel):
                self._model.require_backward_grad_sync = part.last
            yield part

    def commit(
        self, *, loss: SupportsFloat | None = None, tokens: SupportsFloat | None = None, **metrics: SupportsFloat
    ) -> None:
        """Say that an optimiser step is finished; saves when one is due, and leaves when asked to.

        Leaving is SystemExit(75), `ExitCode.STOPPED_EARLY`: steps are left to do, so it is no success.

        `loss` and other metrics are reported as this rank gives them (rank 0's are the run's); `tokens` are those of
        all ranks in this step. A tensor on a GPU is waited for. A step has 128 metrics at most.
        """
        self.step += 1
        samples, self.global_batch = self.global_batch, 0
        if self._samples is not None:
            self._samples += samples
        given = {"loss": loss, "tokens": tokens, "total_steps": self._total, "global_batch": samples or None, **metrics}
        self._report({name: _number(value) for name, value in given.items() if value is not None})
        scheduled = self._scheduled()
        action = self._agreement.exchange(self._wish(), scheduled=scheduled)
        if action is not Wish.NOTHING:
            self._save(must=action is Wish.STOP)
        if action is Wish.STOP:
            self._finish(asked=scheduled is not Wish.STOP)

    def _report(self, metrics: dict[str, float]) -> None:
        now = self._clock()
        # JSON has no NaN or infinity; a metric that is one is left out, and so is one too many.
        finite = {name: value for name, value in list(metrics.items())[:METRICS] if math.isfinite(value)}
        self._channel.send(
            Step(step=self.step, started=self._boundary, ended=now, checkpoint_s=self._waited_s, metrics=finite)
        )
        self._boundary, self._waited_s = now, 0.0

    def _scheduled(self) -> Wish:
        """What every rank knows by counting; the last step of all is a stop: nobody is left to agree afterwards."""
        if self.step == self._total:
            return Wish.STOP
        if self._every_steps is not None and self.step % self._every_steps == 0:
            return Wish.CHECKPOINT
        return Wish.NOTHING

    def _wish(self) -> Wish:
        """What this rank was asked for; the seconds are counted by rank 0 alone."""
        wish = Wish.STOP if self._terminated else Wish.NOTHING
        for request in self._channel.requests():
            wish = max(wish, Wish.CHECKPOINT if isinstance(request, CheckpointNow) else Wish.STOP)
        overdue = self._every_s is not None and time.monotonic() - self._saved_at >= self._every_s
        return max(wish, Wish.CHECKPOINT) if overdue and self._ranks.rank == 0 else wish

    def _save(self, *, must: bool) -> None:
        if self._checkpoints is None:
            return
        began = time.monotonic()
        try:
            path = self._checkpoints.save(self.step, self._samples)
        except HoldfastError as error:
            if self._ranks.rank == 0:
                self._channel.found(error.findings[0])
            if must or error.findings[0].code == SUPERSEDED:
                raise
        else:
            if self._ranks.rank == 0:
                took_s = time.monotonic() - began
                self._channel.send(Checkpointed(step=self.step, path=str(path), took_s=took_s))
        self._saved_at = time.monotonic()
        self._waited_s = self._saved_at - began

    def _resume(self, checkpoints: Checkpoints) -> None:
        self.step, findings, self._samples = checkpoints.restore()
        for finding in findings:
            self._channel.found(finding)
        if self.step and self._ranks.rank == 0:
            say(f"resumed after step {self.step} from {checkpoints.path(self.step)}")

    def _note_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self._terminated = True

    def _finish(self, *, asked: bool) -> None:
        _on_sigterm(self._previous_sigterm)
        if asked:
            if self._ranks.rank == 0:
                say(f"stopped after step {self.step}, as asked")
            raise SystemExit(ExitCode.STOPPED_EARLY)


def _on_sigterm(handler: Handler) -> Handler:
    """Install a handler and return the one before; nothing changes outside the main thread, which alone may do so."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


def _number(value: SupportsFloat) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
