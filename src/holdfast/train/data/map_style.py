"""Reads map-style datasets: workers prefetch the items of the next samples.

Which samples a rank gets: sharding.py. The order of an epoch's items: index_shuffle.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from holdfast.errors import HoldfastError
from holdfast.train.data.index_shuffle import IndexShuffle
from holdfast.train.data.seeding import seed_for_sample
from holdfast.train.data.sharding import ShardPlan
from holdfast.train.data.workers import WorkerFailure, init_worker, reraise_failures

LOOKAHEAD_SAMPLES = 256
"""Samples whose item indices are computed at a time: 0.5 µs each, against 100 µs for a single one."""

Collate = Callable[[list[Any]], Any]


def read_map_style(
    dataset: Any,
    order: IndexShuffle,
    plan: ShardPlan,
    first: int,
    *,
    seed: int,
    workers: int,
    collate: Collate,
    pin_memory: bool,
) -> Iterator[Any]:
    """The collated data of this rank's micro-batches, starting with the step whose first sample is `first`."""
    loader: DataLoader[Any] = DataLoader(
        cast("Any", _WorkerDataset(dataset, seed if workers else None)),
        batch_sampler=_IndexSampler(order, plan, first),
        num_workers=workers,
        collate_fn=_CollateOrFail(collate),
        pin_memory=pin_memory,
        worker_init_fn=init_worker,
        # Seeds the workers: a restart must not draw from the loop's own generator.
        generator=torch.Generator(),
    )
    return reraise_failures(loader)


@dataclass(frozen=True)
class _IndexSampler:
    """Yields the samples of each coming micro-batch, each with its item index."""

    order: IndexShuffle
    plan: ShardPlan
    first: int

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        onwards = self.plan.steps_from(self.first)
        while True:
            parts = [next(onwards).samples]
            while sum(map(len, parts)) < LOOKAHEAD_SAMPLES:
                parts.append(next(onwards).samples)
            samples = np.concatenate([np.arange(part.start, part.stop) for part in parts])
            pairs = list(zip(samples.tolist(), self.order.item_indices(samples).tolist(), strict=True))
            for part in parts:
                yield pairs[: len(part)]
                del pairs[: len(part)]


@dataclass(frozen=True)
class _WorkerDataset:
    """The dataset as workers access it."""

    dataset: Any
    seed: int | None
    """None in the rank's own process, whose generators belong to the loop and are in the checkpoint."""

    def __getitems__(self, wanted: list[tuple[int, int]]) -> list[Any] | WorkerFailure:
        try:
            if hasattr(self.dataset, "__getitems__"):
                self._seed_rng(wanted[0][0])
                return self.dataset.__getitems__([item for _, item in wanted])
            return [self._item(sample, item) for sample, item in wanted]
        except HoldfastError as error:
            return WorkerFailure(error.findings, error.exit_code)

    def _item(self, sample: int, item: int) -> Any:
        self._seed_rng(sample)
        return self.dataset[item]

    def _seed_rng(self, sample: int) -> None:
        if self.seed is not None:
            seed_for_sample(self.seed, sample)


@dataclass(frozen=True)
class _CollateOrFail:
    collate: Collate

    def __call__(self, items: list[Any] | WorkerFailure) -> Any:
        return items if isinstance(items, WorkerFailure) else self.collate(items)
