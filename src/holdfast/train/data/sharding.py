"""Shards the samples of a step over the ranks present: each sample goes to exactly one rank, at any world size.

Pure: knows samples only by number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from holdfast.train.session.control_group import ControlGroup


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The part of a rank's samples that it computes in one forward and backward pass."""

    samples: range
    """Sample numbers, counted from 0 over the whole training; the data source maps them to samples."""
    loss_scale: float
    """Factor on the mean loss over these samples; 1 if all ranks are present.

    It makes the gradient mean over ranks equal the mean over all samples of the step, at any world size.
    """
    is_last: bool
    """Whether it is the rank's last micro-batch of the step."""


@dataclass(frozen=True, kw_only=True)
class Batch(MicroBatch):
    """A micro-batch with its data."""

    data: Any
    """The samples, collated as torch's DataLoader does it."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How coming steps are sharded to one rank while the world size stays the same."""

    global_batch: int
    """Samples of a step."""
    micro_batch_size: int
    rank: int
    world_size: int

    def step(self, first: int) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of the step whose first sample is `first`."""
        ranks = ControlGroup(rank=self.rank, world_size=self.world_size)
        return shard_step(range(first, first + self.global_batch), self.micro_batch_size, ranks)

    def steps_from(self, first: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of that step and all later steps."""
        return (part for begin in count(first, self.global_batch) for part in self.step(begin))

    def weight_of(self, ranks: range) -> float:
        """The samples of some ranks in a step, divided by those of as many ranks with an equal share each."""
        samples = range(self.global_batch)
        held = sum(len(_split(samples, rank, self.world_size)) for rank in ranks)
        return held * self.world_size / (self.global_batch * len(ranks))


def shard_step(samples: range, micro_batch_size: int, ranks: ControlGroup) -> tuple[MicroBatch, ...]:
    """A rank's part of a step's samples, in micro-batches of at most `micro_batch_size`.

    Every rank gets the same number of micro-batches, for collectives inside the model; a rank that runs out of
    samples computes its first again with a loss scale of 0. Needs at least one sample per rank.
    """
    share = _split(samples, ranks.rank, ranks.world_size)
    most = -(-len(samples) // ranks.world_size)
    count = -(-most // micro_batch_size)
    parts = [_split(share, number, count) for number in range(count)]
    return tuple(
        MicroBatch(
            samples=part or share[:1], loss_scale=len(part) * ranks.world_size / len(samples), is_last=number == count
        )
        for number, part in enumerate(parts, 1)
    )


def _split(whole: range, index: int, count: int) -> range:
    """One of `count` consecutive parts of nearly equal length; the first parts are the longer ones."""
    shortest, longer = divmod(len(whole), count)
    start, end = (number * shortest + min(number, longer) for number in (index, index + 1))
    return whole[start:end]
