"""Owns a rank's life from first step to last: what was finished is reported, saved when due, and left when asked.

Works alike under holdfast, under torchrun and in a bare `python train.py`. Refuses to own the loop (the user's), the
files (checkpoint.py), and what the watchers are told and ask for (liaison.py).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, SupportsFloat, TypeVar

from torch import nn
from torch.optim import Optimizer

from holdfast.errors import ExitCode, failure
from holdfast.events.rank import Doing
from holdfast.findings import Finding, Severity
from holdfast.measure.flops import PerToken
from holdfast.train import ending
from holdfast.train.apart import Apart
from holdfast.train.batches import Batch, MicroBatch, Plan
from holdfast.train.channel import say
from holdfast.train.checkpoint import Checkpoints, Saved
from holdfast.train.data.data import Data
from holdfast.train.data.supply import Supply
from holdfast.train.depot import Depot, Shared, unsaved
from holdfast.train.environment import Environment
from holdfast.train.liaison import Liaison
from holdfast.train.meter import Meter
from holdfast.train.peercopies import PeerCopies
from holdfast.train.profiler import waiting_for_checkpoint
from holdfast.train.ranks import NOTHING, Ranks, Wish
from holdfast.train.rate import ScaledRate
from holdfast.train.replicas import Alone, Replicas, Several, Standing, Unmet
from holdfast.train.retention import Retention
from holdfast.train.store import Store
from holdfast.train.tenure import REFUSALS, error_of
from holdfast.train.tiers import Tiers
from holdfast.train.training import Stateful, Training

Item = TypeVar("Item")


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
        flops_per_token: PerToken | float | None = None,
        sequence_length: int | None = None,
        report_to: Sequence[str] | None = None,
    ) -> None:
        """Resume from the newest complete checkpoint, if there is one; called by every rank, after init_process_group.

        `extra` is anything of the user's with a state_dict, kept per rank. `environment` replaces what the process
        was told through its variables.

        MFU needs the FLOPs of a token: those of `flops_per_token` (a plain number counts attention in full), else what
        the model's transformers config comes to, for sequences of `sequence_length` tokens; without that, of as many
        as a step has for each of its samples.

        `report_to` names trackers that are told of each step as well: "tensorboard", "wandb", "mlflow".
        """
        told = environment or Environment.read()
        if report_to is not None:
            told = replace(told, report_to=tuple(report_to))
        self.step = 0
        """Optimiser steps finished so far, those before a restart included."""
        self._samples: int | None = None
        """Samples that those steps took; not known of a loop that never asked for micro-batches."""
        meter = Meter(model, flops_per_token=flops_per_token, sequence_length=sequence_length)
        self._liaison = Liaison(told, meter)
        ranks = self._liaison.ranks
        if told.rank_socket is None and ranks.rank == 0:
            say(told.checkpoints_in_words)
        self._supply = Supply(self._liaison.found)
        self._extra, self._taken_by = extra, 0
        """Ranks that took the checkpoint, where it was another number and nobody has said yet what follows."""
        training = Training(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            extra=extra,
            data=self._supply,
            sequence_length=sequence_length,
        )
        self._checkpoints: Checkpoints | None = None
        self._copies: PeerCopies | None = None
        if told.checkpoint_path is not None:
            depot = _depot(told, told.checkpoint_path, ranks)
            copies = self._copies = _copies(told, training, ranks)
            self._checkpoints = Checkpoints(
                depot,
                training=training,
                ranks=ranks,
                memory=told.handover,
                writer=told.writer,
                copies=copies,
                lasting=told.checkpoint_lasting,
            )
            self._liaison.hands_over = True
        if self._copies is not None:
            self._liaison.copy_every, self._liaison.copy_due = told.peer_copies, self._copies.is_due
            if (within := self._copies.within()) is not None:
                self._liaison.found(within)
        self._replicas: Replicas = Alone(model)
        if told.replica_count > 1:
            joined = Several if told.sync is None else Apart
            self._replicas = joined(told, training, self._liaison, resume=self._resume)
        else:
            self._resume()
        self._batch_ranks = told.batch_world_size
        self._rate = ScaledRate(optimizer, told.learning_rate_factor)
        self.global_batch = 0
        """Samples that all ranks take in the step in hand; 0 until it has asked for micro-batches."""
        self._total: int | None = None
        self._in_vain = False
        """Whether the step in hand was ended and does not count."""
        self._liaison.begin()

    def steps(self, total: int) -> Iterator[int]:
        """The numbers, from 1, of the steps still to be done; each is `commit`ted before the next is taken."""
        self._total = total
        self._liaison.listen()
        try:
            while True:
                try:
                    standing = Standing(self.step, self._samples)
                    self.step, self._samples = self._replicas.begin(standing, ended=self.step >= total)
                except Unmet as alone:
                    self._leave(alone.standing)
                step = self.step + 1
                if step > total:
                    return
                self._in_vain = False
                yield step
                if self.step != step and not self._in_vain:
                    raise failure(
                        "step-not-committed",
                        f"step {step} ended with {self.step} steps committed",
                        exit_code=ExitCode.USAGE,
                        remedy="call session.commit(...) exactly once at the end of each step",
                    )
        finally:
            self._liaison.rest()

    @contextmanager
    def aside(self) -> Generator[None]:
        """What is no step, such as an evaluation between two: `recovery.step_deadline_s` is not for it.

        It may change weights and put them back: no checkpoint is being copied from them.
        """
        self._liaison.turn(Doing.ASIDE)
        if self._checkpoints is not None:
            self._checkpoints.wait()
        if self._copies is not None:
            self._copies.wait()
        try:
            yield
        finally:
            self._liaison.turn(Doing.STEPS)

    def batches(self, data: Data) -> Iterator[Batch]:
        """This rank's micro-batches of the step in hand with their data, read ahead; see `micro_batches`."""
        first, plan = self._begin(data.batch, data.at_once)
        parts = self._parts(first, plan)
        yield from self.waiting(self._supply.fill(part, data, plan, first) for part in parts)

    def micro_batches(self, batch: int, *, at_once: int | None = None) -> Iterator[MicroBatch]:
        """This rank's samples of the step in hand, `batch` of them where all ranks are there; `at_once` at a time.

        With fewer ranks each has more micro-batches (`recovery.global_batch: keep`), or the step has fewer samples
        (`scale`). Each sample is in exactly one committed step. DDP exchanges gradients with the last of them only.
        """
        yield from self._parts(*self._begin(batch, at_once or batch))

    def _begin(self, batch: int, at_once: int) -> tuple[int, Plan]:
        """The first sample of the step in hand, and how its samples are dealt."""
        ranks, replicas = self._liaison.ranks, self._replicas
        world_size = ranks.world_size * replicas.count
        self.global_batch = batch * (self._batch_ranks or world_size)
        if self._samples is None:
            self._samples = self.step * self.global_batch
        self._rate.apply()
        self._supply.begin(self.global_batch, self._samples)
        rank = ranks.world_size * replicas.place + ranks.rank
        plan = Plan(global_batch=self.global_batch, at_once=at_once, rank=rank, world_size=world_size)
        return self._samples, plan

    def _parts(self, first: int, plan: Plan) -> Iterator[MicroBatch]:
        for part in plan.step(first):
            self._replicas.expect(last=part.last)
            yield part

    def waiting(self, source: Iterable[Item]) -> Iterator[Item]:
        """The same items, such as the batches of a loader; the time until each is there is reported as data wait."""
        return self._liaison.meter.waiting(source)

    def commit(
        self, *, loss: SupportsFloat | None = None, tokens: SupportsFloat | None = None, **metrics: SupportsFloat
    ) -> None:
        """Say that an optimiser step is finished; saves when one is due, and leaves when asked to.

        Leaving is SystemExit(75), `ExitCode.STOPPED_EARLY`: steps are left to do, so it is no success.

        `loss` is this rank's own, `tokens` are those of all ranks, of all replicas, in this step, and of other metrics
        rank 0's count. A tensor on a GPU is waited for. A step has 128 metrics at most.
        """
        samples, self.global_batch = self.global_batch, 0
        try:
            settled = self._replicas.settle(
                Standing(self.step + 1, None if self._samples is None else self._samples + samples)
            )
        except Unmet as alone:
            self._leave(alone.standing)
        if settled is None:
            self._in_vain = True
            return
        self.step, self._samples = settled
        if self._taken_by:
            self._tell_of_another_world()
        given = {"loss": loss, "tokens": tokens, "global_batch": samples or None, **self._replicas.metrics, **metrics}
        if self._checkpoints is not None:
            self._liaison.waited(self._checkpoints.take_waited_s())
        if self._copies is not None:
            self._liaison.waited(self._copies.take_waited_s())
            given["peer_copy_s"] = self._copies.take_took_s()
        self._liaison.report(self.step, total=self._total, metrics=given)
        action = self._liaison.wish(self.step, total=self._total, parting=self._replicas.parting)
        if self._liaison.parts:
            self._replicas.part()
        if action is Wish.HAND_OVER and self._checkpoints is not None:
            action = self._hand_over(self._checkpoints)
        if self._checkpoints is not None:
            began = time.monotonic()
            with waiting_for_checkpoint():
                self._save(self._checkpoints, action)
                if self._copies is not None:
                    self._copy(self._checkpoints, self._copies, action)
            self._liaison.waited(time.monotonic() - began)
        self._liaison.turn(Doing.STEPS)
        if action is Wish.STOP and self.step == self._total:
            self._liaison.end()
        elif action is Wish.STOP:
            self._liaison.leave(self.step)

    def _hand_over(self, checkpoints: Checkpoints) -> Wish:
        """Leave the state to the processes that take these ranks' places, and leave; or return what else serves."""
        self._tell(checkpoints.finish(), must=False)
        if self._copies is not None:
            self._copies.finish()
        problem = checkpoints.hand_over(self.step, self._samples, node_s=self._liaison.node_s)
        if problem is None:
            ending.hasten()
            self._liaison.leave(self.step)
        self._liaison.found(problem)
        return Wish.STOP

    def _save(self, checkpoints: Checkpoints, action: Wish) -> None:
        """Tell of the save under way once it has ended, and begin the next when it is due.

        One at a time: a save that is due waits for the one before, on all ranks alike, and so does a stop for its own.
        """
        if self._replicas.place > 0:  # The first of them saves for all: they are equal, and soon meet again.
            if Wish.CHECKPOINT in action:
                self._liaison.saving()
            self._tell(checkpoints.finished(), must=False)
            return
        if action is NOTHING or action is Wish.COPY:
            self._tell(checkpoints.finished(), must=False)
            checkpoints.prepare()
            return
        self._tell(checkpoints.finish(), must=False)
        if self._liaison.sound():
            self._liaison.saving()
            checkpoints.begin(self.step, self._samples, node_s=self._liaison.node_s)
        if action is Wish.STOP:
            self._tell(checkpoints.finish(), must=True)
            self._raise(checkpoints.close(), must=True)

    def _leave(self, standing: Standing) -> NoReturn:
        """Save what there is and leave, without the others: any of them may be the only one that has it."""
        if self._checkpoints is not None and standing.step > 0:
            self._liaison.turn(Doing.ASIDE)
            self._tell(self._checkpoints.finish(), must=False)
            if self._liaison.sound():
                self._checkpoints.begin(*standing, node_s=self._liaison.node_s)
                self._tell(self._checkpoints.finish(), must=True)
            self._raise(self._checkpoints.close(), must=True)
        self._liaison.leave(standing.step)

    def _copy(self, checkpoints: Checkpoints, copies: PeerCopies, action: Wish) -> None:
        """Copy the state to another node's memory when that is due; a copy that is due waits for the one before."""
        if action & Wish.STOP:
            copies.finish()
        elif not action & Wish.COPY:
            copies.prepare()
        else:
            if (copied := copies.finish()) is not None:
                self._raise(copied.problem, must=False)
            if self._liaison.sound():
                copies.begin(checkpoints.unsealed(self.step, self._samples, self._liaison.node_s))

    def _tell(self, saved: Saved | None, *, must: bool) -> None:
        if saved is None:
            return
        self._raise(saved.noticed, must=False)
        if saved.problem is None:
            self._liaison.committed(saved.step, saved.path, took_s=saved.took_s)
            return
        refused = saved.problem.code in REFUSALS
        self._raise(saved.problem if refused else unsaved(saved.problem, last=must), must=must)

    def _raise(self, problem: Finding | None, *, must: bool) -> None:
        """Say what went wrong; it ends the loop where it must not be, or the place is another's."""
        if problem is None:
            return
        ends = must or problem.code in REFUSALS
        self._liaison.found(problem, ends=ends)
        if ends:
            raise error_of(problem)

    def _resume(self) -> Standing:
        """Go on from the newest checkpoint, if there is one."""
        if self._checkpoints is None:
            return Standing(self.step, self._samples)
        self.step, findings, self._samples, node_s, where, taken_by = self._checkpoints.restore()
        self._liaison.resume(node_s)
        for finding in findings:
            self._liaison.found(finding)
        there = self._liaison.ranks.world_size
        if self.step and taken_by != there:
            self._taken_by = taken_by
            where += f", which {taken_by} took; the number of ranks is {there} now"
        if self.step:
            self._liaison.resumed(self.step, where)
        return Standing(self.step, self._samples)

    def _tell_of_another_world(self) -> None:
        """Say what does not go on as it was: model, optimiser and the session's own data do."""
        rows = (
            (self._samples is None, "the loop takes its samples itself: see how many a step has, and which come next"),
            (self._extra is not None, "`extra` is kept for each rank: one that is new has rank 0's"),
        )
        taken_by, self._taken_by = self._taken_by, 0
        if evidence := tuple(words for holds, words in rows if holds):
            self._liaison.found(_another_world(taken_by, self._liaison.ranks.world_size, evidence))


def _depot(told: Environment, path: Path | str, ranks: Ranks) -> Depot:
    """The depot that a rank was told of."""
    retention = Retention(keep=told.checkpoint_keep, keep_every=told.checkpoint_keep_every)
    if told.checkpoint_local is None:
        return Shared(Path(path), retention=retention, ranks=ranks, writer=told.writer)
    store = Store(str(path), told.writer)
    return Tiers(told.checkpoint_local, store, retention=retention, ranks=ranks, replica=told.replica)


def _copies(told: Environment, training: Training, ranks: Ranks) -> PeerCopies | None:
    """The copies that a rank was told to make; several replicas are copies of one another."""
    if not told.peer_copies or not told.peer_memory or told.replica_count > 1:
        return None
    return PeerCopies(told.peer_memory, training=training, ranks=ranks, writer=told.writer, nodes=told.nodes)


def _another_world(was: int, now: int, evidence: tuple[str, ...]) -> Finding:
    return Finding(
        code="world-size-changed",
        severity=Severity.WARNING,
        what=f"the checkpoint was taken by {was} ranks, {now} go on with it, and not all goes on as it was",
        evidence=evidence,
        remedy="`Session.batches` and `micro_batches` deal samples to whatever ranks there are",
    )
