"""Reads streams: a sample's number is its position, and every rank skips the samples of other ranks.

So at any world size sample 1000 is the stream's thousandth, and the stream's position is the same on all ranks. About
once a second the reader takes a `ResumePoint` with a fingerprint of the next block. After a restart the stream's own
state is used only if it yields the same block; otherwise the reader replays the epoch from its beginning.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Severity
from holdfast.train.data.fingerprint import sample_fingerprint
from holdfast.train.data.map_style import Collate
from holdfast.train.data.seeding import isolated_rng, seed_for_sample
from holdfast.train.data.sharding import ShardPlan
from holdfast.train.data.stream_iterator import StreamIterator
from holdfast.train.data.workers import WorkerFailure, init_only_worker, reraise_failures

RESUME_POINT_EVERY_S = 1.0
"""Seconds between two resume points; a restart reads about this much again."""

BLOCK = 32
"""Samples read at a time: swapping the random generators costs 20 µs and seeding them 10 µs. The fingerprint covers a
whole block, because a single sample may match by chance after a shuffle buffer was refilled."""


class ResumePoint(NamedTuple):
    """A position from which a stream can resume: the start of a block."""

    sample: int
    """Number of the next sample."""
    epoch: int
    epoch_start: int
    """Number of the epoch's first sample."""
    state: Any
    """The stream's own state; None if it has none."""
    fingerprint: str
    """Fingerprint of the next block."""


class StreamBatch(NamedTuple):
    """The data of a micro-batch, with its reader's resume point and findings."""

    data: Any
    resume_point: ResumePoint | None
    findings: tuple[Finding, ...]


def read_stream(
    stream: Any,
    plan: ShardPlan,
    first: int,
    resume_point: ResumePoint | None,
    *,
    unread: Any,
    seed: int,
    workers: int,
    collate: Collate,
    pin_memory: bool,
) -> Iterator[StreamBatch]:
    """The data of this rank's micro-batches, starting with the step whose first sample is `first`.

    `unread` is the stream's state before its first sample was read, by whichever reader; None if it cannot be loaded.
    """
    loader: DataLoader[Any] = DataLoader(
        _StepDataset(stream, unread, plan, first, resume_point, seed, collate),
        batch_size=None,
        num_workers=min(workers, 1),  # Each worker would read the whole stream.
        collate_fn=cast("Any", _as_it_is),
        pin_memory=pin_memory,
        worker_init_fn=init_only_worker,
        generator=torch.Generator(),
    )
    return reraise_failures(loader)


def _as_it_is(filled: StreamBatch) -> StreamBatch:
    return filled


@dataclass(frozen=True)
class _StepDataset(IterableDataset[Any]):
    stream: Any
    unread: Any
    plan: ShardPlan
    first: int
    resume_point: ResumePoint | None
    seed: int
    collate: Collate

    def __iter__(self) -> Iterator[StreamBatch | WorkerFailure]:
        try:
            yield from self._filled()
        except HoldfastError as error:
            # Repeated: torch takes 5 s to stop a worker whose stream has ended.
            yield from repeat(WorkerFailure(error.findings, error.exit_code))

    def _filled(self) -> Iterator[StreamBatch]:
        reader = StreamReader(self.stream, unread=self.unread, seed=self.seed, min_length=self.plan.global_batch)
        findings = reader.resume(self.first, self.resume_point)
        for begin in count(self.first, self.plan.global_batch):
            parts = self.plan.step(begin)
            resume_point = reader.take_resume_point()
            start = min(part.samples.start for part in parts)
            reader.skip_to(start)
            samples = [reader.next_sample() for _ in range(max(part.samples.stop for part in parts) - start)]
            for part in parts:
                data = self.collate(samples[part.samples.start - start : part.samples.stop - start])
                yield StreamBatch(data, resume_point, findings)
                resume_point, findings = None, ()


class StreamReader:
    """Reads a stream epoch after epoch, one block at a time, and counts samples.

    Random draws are reseeded at every block and epoch: they depend only on the seed and the first sample, and leave
    the process's own generators unchanged.
    """

    def __init__(self, stream: Any, *, unread: Any, seed: int, min_length: int) -> None:
        """`min_length` is the minimum length of an epoch; in a shorter one a step would take a sample twice."""
        self._stream, self._unread, self._seed, self._min_length = stream, unread, seed, min_length
        self._resume_point: ResumePoint | None = None
        self._marked_at = 0.0
        self._ahead = deque[Any]()
        self._open_unread(epoch=0, epoch_start=0)

    def _open_unread(self, *, epoch: int, epoch_start: int) -> None:
        """Position the stream at the start of an epoch, wherever another reader has left it."""
        if self._unread is not None:
            self._stream.load_state_dict(copy.deepcopy(self._unread))  # it may keep and change what it loads
        self._open(epoch_start, epoch=epoch, epoch_start=epoch_start)

    def _open(self, sample: int, *, epoch: int, epoch_start: int, state: Any = None) -> None:
        """Position the stream so that `sample`, the start of a block, is read next."""
        self._read_to, self._epoch, self._epoch_start, self._epoch_ended = sample, epoch, epoch_start, False
        with isolated_rng():
            seed_for_sample(self._seed, sample)
            self._iterator = StreamIterator(self._stream, epoch=epoch, state=state)

    def next_sample(self) -> Any:
        """The next sample."""
        if not self._ahead:
            self._read_block()
        return self._ahead.popleft()

    def skip_to(self, sample: int) -> None:
        """Skip the samples before this one."""
        while self._read_to - len(self._ahead) < sample:
            self.next_sample()

    def take_resume_point(self) -> ResumePoint | None:
        """The latest resume point taken since the last call; it precedes the next sample."""
        resume_point, self._resume_point = self._resume_point, None
        return resume_point

    def resume(self, sample: int, resume_point: ResumePoint | None) -> tuple[Finding, ...]:
        """Move to a sample, from an earlier resume point if there is one; returns findings about it."""
        findings: list[Finding] = []
        began = time.monotonic()
        if resume_point is not None and resume_point.state is not None:
            if why := self._seek(resume_point):
                findings.append(_not_bit_exact(why))
            else:
                self.skip_to(sample)
                return ()
        if resume_point is not None:
            self._replay(resume_point)
        else:
            self._read_block()  # so that there is a resume point before the first step ends
        self.skip_to(sample)
        if passed := sample - (0 if resume_point is None else resume_point.epoch_start):
            findings.append(_skipped(passed, time.monotonic() - began))
        return tuple(findings)

    def _seek(self, resume_point: ResumePoint) -> str:
        """Restore the stream's own state; returns the reason if the result is not the same stream."""
        try:
            self._ahead.clear()
            self._open(
                resume_point.sample,
                epoch=resume_point.epoch,
                epoch_start=resume_point.epoch_start,
                state=resume_point.state,
            )
            return "" if self._next_fingerprint() == resume_point.fingerprint else "the samples that follow are others"
        except HoldfastError:
            raise
        except Exception as error:  # The stream is user code, and can still be read from the beginning.
            return f"{type(error).__name__}: {error}"

    def _replay(self, resume_point: ResumePoint) -> None:
        """Replay the epoch of the resume point from its beginning."""
        self._ahead.clear()
        self._open_unread(epoch=resume_point.epoch, epoch_start=resume_point.epoch_start)
        self.skip_to(resume_point.sample)
        if self._next_fingerprint() != resume_point.fingerprint:
            raise failure(
                "data-changed",
                f"sample {resume_point.sample} of the stream is not what it was when the checkpoint was taken",
                exit_code=ExitCode.CANNOT_RUN_HERE,
                where=type(self._stream).__name__,
                remedy="give the data that the training began with; a stream that shuffles needs a seed",
            )

    def _next_fingerprint(self) -> str:
        """The fingerprint of the block that begins here."""
        if not self._ahead:
            self._read_block()
        return sample_fingerprint(list(self._ahead))

    def _read_block(self) -> None:
        """Read a block, and take a resume point before it when one is due."""
        place = None
        if time.monotonic() - self._marked_at >= RESUME_POINT_EVERY_S:
            place = ResumePoint(self._read_to, self._epoch, self._epoch_start, self._iterator.state(), "")
        if self._epoch_ended:
            self._begin_epoch()
        ends = self._read_to // BLOCK * BLOCK + BLOCK
        with isolated_rng():
            seed_for_sample(self._seed, self._read_to)
            self._ahead.extend(islice(self._iterator, ends - self._read_to))
        self._read_to += len(self._ahead)
        self._epoch_ended = self._read_to < ends
        if not self._ahead:
            self._read_block()
        elif place is not None:
            self._resume_point, self._marked_at = place._replace(fingerprint=self._next_fingerprint()), time.monotonic()

    def _begin_epoch(self) -> None:
        """Begin the next epoch, but only when it is read: until then a stream may not know its position."""
        length = self._read_to - self._epoch_start
        if length < self._min_length:
            raise dataset_too_small(self._min_length, length, type(self._stream).__name__)
        self._open(self._read_to, epoch=self._epoch + 1, epoch_start=self._read_to)


def dataset_too_small(global_batch: int, length: int, where: str) -> HoldfastError:
    """Error for a dataset too small for a step: the step would take a sample twice."""
    if length == 0:
        return failure(
            "data-empty",
            "the dataset has no samples",
            exit_code=ExitCode.USAGE,
            where=f"Data({where})",
            remedy="look at where it is read from, and at what is filtered out; a generator can be read only once",
        )
    return failure(
        "data-smaller-than-batch",
        f"a step takes {global_batch} samples, and the dataset has {length}",
        exit_code=ExitCode.USAGE,
        where=f"Data({where})",
        remedy="make the batch smaller, or give more data: else a step would take a sample twice",
    )


def _not_bit_exact(why: str) -> Finding:
    return Finding(
        code="data-state-not-bit-exact",
        severity=Severity.WARNING,
        what="the stream does not resume exactly from its own state; it is read from the beginning of the epoch",
        evidence=(why,),
        remedy="none needed; datasets' `shuffle(buffer_size=...)` does not keep what its buffer held, for one",
    )


def _skipped(count: int, took_s: float) -> Finding:
    return Finding(
        code="data-replayed",
        severity=Severity.INFO,
        what=f"{count} samples of the stream were read and skipped to resume where the checkpoint was taken",
        evidence=(f"{took_s:.1f} s",),
        remedy="a stream with state_dict and load_state_dict resumes without reading them again",
    )
