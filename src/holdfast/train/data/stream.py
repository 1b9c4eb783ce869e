"""Owns reading streams: a sample's number is its place, and every rank reads past the samples of the others.

So whatever the world size, sample 1000 is the stream's thousandth, and where a stream stands is the same on all ranks.
About once a second the reader notes a `Mark`, with a digest of the block that follows: a stream that says it can go on
from its own state is believed only if it is the same again, else it is read from the beginning of the epoch.
"""

from __future__ import annotations

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
from holdfast.train.batches import Plan
from holdfast.train.data.chance import apart, sow
from holdfast.train.data.cursor import Cursor
from holdfast.train.data.digest import digest
from holdfast.train.data.numbered import Collate
from holdfast.train.data.workers import Broken, settle_alone, watched

MARK_S = 1.0
"""Seconds between two marks: what is read again after a restart costs about as much."""

BLOCK = 32
"""Samples that are read at a time, for lending the generators costs 20 µs and sowing them 10. Their digest is what a
place is known again by: a single one may be the same by chance where a shuffle buffer was filled anew."""


class Mark(NamedTuple):
    """A place in a stream that it can be read on from: where a block begins."""

    sample: int
    """The number of the sample that follows."""
    epoch: int
    began: int
    """The number of the epoch's first sample."""
    state: Any
    """The stream's own; None where it has none."""
    digest: str
    """Of that block."""


class Filled(NamedTuple):
    """The data of a micro-batch, and what its reader has to say."""

    data: Any
    mark: Mark | None
    noticed: tuple[Finding, ...]


def streamed(
    stream: Any,
    plan: Plan,
    first: int,
    mark: Mark | None,
    *,
    seed: int,
    workers: int,
    collate: Collate,
    pin_memory: bool,
) -> Iterator[Filled]:
    """The data of this rank's micro-batches from the step on that begins with sample `first`."""
    loader: DataLoader[Any] = DataLoader(
        _Steps(stream, plan, first, mark, seed, collate),
        batch_size=None,
        num_workers=min(workers, 1),  # Each would read all of the stream.
        collate_fn=cast("Any", _as_it_is),
        pin_memory=pin_memory,
        worker_init_fn=settle_alone,
        generator=torch.Generator(),
    )
    return watched(loader)


def _as_it_is(filled: Filled) -> Filled:
    return filled


@dataclass(frozen=True)
class _Steps(IterableDataset[Any]):
    stream: Any
    plan: Plan
    first: int
    mark: Mark | None
    seed: int
    collate: Collate

    def __iter__(self) -> Iterator[Filled | Broken]:
        try:
            yield from self._filled()
        except HoldfastError as error:
            # Again and again: torch takes 5 s to part from a worker whose stream has ended.
            yield from repeat(Broken(error.findings, error.exit_code))

    def _filled(self) -> Iterator[Filled]:
        reader = Reader(self.stream, seed=self.seed, least=self.plan.global_batch)
        noticed = reader.go(self.first, self.mark)
        for begin in count(self.first, self.plan.global_batch):
            parts = self.plan.step(begin)
            mark = reader.marked()
            start = min(part.samples.start for part in parts)
            reader.skip_to(start)
            samples = [reader.take() for _ in range(max(part.samples.stop for part in parts) - start)]
            for part in parts:
                data = self.collate(samples[part.samples.start - start : part.samples.stop - start])
                yield Filled(data, mark, noticed)
                mark, noticed = None, ()


class Reader:
    """Reads a stream over and over, counting, a block at a time.

    What the stream draws at random begins anew with every block and epoch: it depends on the seed and their first
    sample alone, and leaves the process's own generators where they stood.
    """

    def __init__(self, stream: Any, *, seed: int, least: int) -> None:
        """`least` is what an epoch must have, or a step would take a sample twice."""
        self._stream, self._seed, self._least = stream, seed, least
        self._unread = Cursor.state_of(stream)
        self._mark: Mark | None = None
        self._marked_at = 0.0
        self._ahead = deque[Any]()
        self._open(0, epoch=0, began=0)

    def _open(self, sample: int, *, epoch: int, began: int, state: Any = None) -> None:
        """Let the sample that is read next be this one, which begins a block."""
        self._read_to, self._epoch, self._began, self._over = sample, epoch, began, False
        with apart():
            sow(self._seed, sample)
            self._cursor = Cursor(self._stream, epoch=epoch, state=state)

    def take(self) -> Any:
        """The next sample."""
        if not self._ahead:
            self._read()
        return self._ahead.popleft()

    def skip_to(self, sample: int) -> None:
        """Read past the samples before this one."""
        while self._read_to - len(self._ahead) < sample:
            self.take()

    def marked(self) -> Mark | None:
        """The last place that was noted since the last call; it lies before the next sample."""
        mark, self._mark = self._mark, None
        return mark

    def go(self, sample: int, mark: Mark | None) -> tuple[Finding, ...]:
        """Go to a sample, from a mark before or at it where there is one; returns what is to be said of that."""
        noticed: list[Finding] = []
        began = time.monotonic()
        if mark is not None and mark.state is not None:
            if why := self._leap(mark):
                noticed.append(_inexact(why))
            else:
                self.skip_to(sample)
                return ()
        if mark is not None:
            self._walk(mark)
        else:
            self._read()  # so that a place is noted before the first step ends
        self.skip_to(sample)
        if passed := sample - (0 if mark is None else mark.began):
            noticed.append(_skipped(passed, time.monotonic() - began))
        return tuple(noticed)

    def _leap(self, mark: Mark) -> str:
        """Let the stream go on from its own state; returns why that cannot be believed."""
        try:
            self._ahead.clear()
            self._open(mark.sample, epoch=mark.epoch, began=mark.began, state=mark.state)
            return "" if self._following() == mark.digest else "the samples that follow are others"
        except HoldfastError:
            raise
        except Exception as error:  # The stream is the user's, and can be read from the beginning all the same.
            return f"{type(error).__name__}: {error}"

    def _walk(self, mark: Mark) -> None:
        """Read on from the beginning of the mark's epoch."""
        if hasattr(self._stream, "load_state_dict"):
            self._stream.load_state_dict(self._unread)
        self._ahead.clear()
        self._open(mark.began, epoch=mark.epoch, began=mark.began)
        self.skip_to(mark.sample)
        if self._following() != mark.digest:
            raise failure(
                "data-changed",
                f"sample {mark.sample} of the stream is not what it was when the checkpoint was taken",
                exit_code=ExitCode.IMPOSSIBLE,
                where=type(self._stream).__name__,
                remedy="give the data that the training began with; a stream that shuffles needs a seed",
            )

    def _following(self) -> str:
        """The digest of the block that begins here."""
        if not self._ahead:
            self._read()
        return digest(list(self._ahead))

    def _read(self) -> None:
        """Read a block, and note the place before it where it is time to."""
        place = None
        if time.monotonic() - self._marked_at >= MARK_S:
            place = Mark(self._read_to, self._epoch, self._began, self._cursor.state(), "")
        if self._over:
            self._begin_anew()
        ends = self._read_to // BLOCK * BLOCK + BLOCK
        with apart():
            sow(self._seed, self._read_to)
            self._ahead.extend(islice(self._cursor, ends - self._read_to))
        self._read_to += len(self._ahead)
        self._over = self._read_to < ends
        if not self._ahead:
            self._read()
        elif place is not None:
            self._mark, self._marked_at = place._replace(digest=self._following()), time.monotonic()

    def _begin_anew(self) -> None:
        """Begin the next epoch: not before it is read, for a stream need not know where it stands until then."""
        length = self._read_to - self._began
        if length < self._least:
            raise too_small(self._least, length, type(self._stream).__name__)
        self._open(self._read_to, epoch=self._epoch + 1, began=self._read_to)


def too_small(global_batch: int, length: int, where: str) -> HoldfastError:
    """Why a dataset cannot be trained on: a step would take a sample twice."""
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


def _inexact(why: str) -> Finding:
    return Finding(
        code="data-state-inexact",
        severity=Severity.WARNING,
        what="the stream does not go on exactly from its own state, so it is read from the beginning of the epoch",
        evidence=(why,),
        remedy="none needed; datasets' `shuffle(buffer_size=...)` does not keep what its buffer held, for one",
    )


def _skipped(count: int, took_s: float) -> Finding:
    return Finding(
        code="data-skipped",
        severity=Severity.INFO,
        what=f"{count} samples of the stream were read and passed over to go on where the checkpoint was taken",
        evidence=(f"{took_s:.1f} s",),
        remedy="a stream with state_dict and load_state_dict goes on at once",
    )
