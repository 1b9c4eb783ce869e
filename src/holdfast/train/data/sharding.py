"""Owns how the samples of a step are dealt to the ranks there are: each to one of them, however many they are.

Pure. Refuses to own what a sample is (its number is all there is of it here) and how far training is (session.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from holdfast.train.session.control_group import ControlGroup


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What a rank computes at once: a part of its share of a step's samples."""

    samples: range
    """Their numbers, counted from 0 over all of the training; a data source says what each is."""
    loss_scale: float
    """What the mean loss over these samples is to be multiplied by; 1 where all ranks are there.

    Then the gradients' mean over ranks is that over all of the step's samples, however many ranks there are.
    """
    is_last: bool
    """Whether it is the rank's last of the step."""


@dataclass(frozen=True, kw_only=True)
class Batch(MicroBatch):
    """A micro-batch with what its samples are."""

    data: Any
    """The samples, collated as torch's DataLoader does it."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How the steps to come are dealt to one rank for as long as the world keeps its size."""

    global_batch: int
    """Samples of a step."""
    micro_batch_size: int
    rank: int
    world_size: int

    def step(self, first: int) -> tuple[MicroBatch, ...]:
        """This rank's part of the step that begins with this sample."""
        ranks = ControlGroup(rank=self.rank, world_size=self.world_size)
        return shard_step(range(first, first + self.global_batch), self.micro_batch_size, ranks)

    def steps_from(self, first: int) -> Iterator[MicroBatch]:
        """This rank's part of that step and of all that follow."""
        return (part for begin in count(first, self.global_batch) for part in self.step(begin))


def shard_step(samples: range, micro_batch_size: int, ranks: ControlGroup) -> tuple[MicroBatch, ...]:
    """A rank's part of a step's samples, at most `micro_batch_size` of them at a time.

    Every rank gets as many micro-batches as every other, for collectives inside the model; one that runs out of samples
    computes its first again, with a weight of 0. Needs a sample for each rank.
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
    """One of `count` parts of nearly equal length, one after the other; the first are the longer ones."""
    shortest, longer = divmod(len(whole), count)
    start, end = (number * shortest + min(number, longer) for number in (index, index + 1))
    return whole[start:end]
