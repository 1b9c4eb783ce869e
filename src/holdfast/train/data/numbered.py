"""Owns reading datasets whose items are found by number: the items of the samples to come, fetched ahead by workers.

Refuses to own which samples a rank gets (batches.py), and in which order an epoch takes the items (order.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from holdfast.errors import HoldfastError
from holdfast.train.batches import Plan
from holdfast.train.data.chance import sow
from holdfast.train.data.order import Order
from holdfast.train.data.workers import Broken, settle, watched

AHEAD = 256
"""Samples whose items are found in the order at a time: 0.5 µs each, where one alone would take 100."""

Collate = Callable[[list[Any]], Any]


def numbered(
    dataset: Any, order: Order, plan: Plan, first: int, *, seed: int, workers: int, collate: Collate, pin_memory: bool
) -> Iterator[Any]:
    """The data of this rank's micro-batches, collated, from the step on that begins with sample `first`."""
    loader: DataLoader[Any] = DataLoader(
        cast("Any", _Fetched(dataset, seed if workers else None)),
        batch_sampler=_Wanted(order, plan, first),
        num_workers=workers,
        collate_fn=_Collated(collate),
        pin_memory=pin_memory,
        worker_init_fn=settle,
        # Workers are seeded from it: a restart must not draw from the loop's own.
        generator=torch.Generator(),
    )
    return watched(loader)


@dataclass(frozen=True)
class _Wanted:
    """The samples of each micro-batch to come, each with its item."""

    order: Order
    plan: Plan
    first: int

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        onwards = self.plan.onwards(self.first)
        while True:
            parts = [next(onwards).samples]
            while sum(map(len, parts)) < AHEAD:
                parts.append(next(onwards).samples)
            samples = np.concatenate([np.arange(part.start, part.stop) for part in parts])
            pairs = list(zip(samples.tolist(), self.order.items(samples).tolist(), strict=True))
            for part in parts:
                yield pairs[: len(part)]
                del pairs[: len(part)]


@dataclass(frozen=True)
class _Fetched:
    """The dataset as workers see it."""

    dataset: Any
    seed: int | None
    """None in the rank's own process, whose generators are the loop's and in the checkpoint."""

    def __getitems__(self, wanted: list[tuple[int, int]]) -> list[Any] | Broken:
        try:
            if hasattr(self.dataset, "__getitems__"):
                self._sow(wanted[0][0])
                return self.dataset.__getitems__([item for _, item in wanted])
            return [self._item(sample, item) for sample, item in wanted]
        except HoldfastError as error:
            return Broken(error.findings, error.exit_code)

    def _item(self, sample: int, item: int) -> Any:
        self._sow(sample)
        return self.dataset[item]

    def _sow(self, sample: int) -> None:
        if self.seed is not None:
            sow(self.seed, sample)


@dataclass(frozen=True)
class _Collated:
    collate: Collate

    def __call__(self, items: list[Any] | Broken) -> Any:
        return items if isinstance(items, Broken) else self.collate(items)
