"""Owns what a loop says of its data.

Refuses to own the reading (numbered.py, stream.py) and how far training is (supply.py, session.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch.utils.data import default_collate  # pyright: ignore[reportUnknownVariableType] - lists of anything

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding
from holdfast.train.batches import Plan
from holdfast.train.data.numbered import numbered
from holdfast.train.data.order import VERSION, Order
from holdfast.train.data.stream import Mark, streamed, too_small


class Data:
    """A dataset for `Session.batches`: every sample in exactly one committed step, whatever happens.

    ::

        data = Data(dataset, batch=8, workers=2)
        for step in session.steps(1000):
            for micro in session.batches(data):
                (loss_of(model, micro.data) * micro.weight).backward()
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch: int,
        at_once: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
        pin_memory: bool = False,
        first: int = 0,
    ) -> None:
        """A rank takes `batch` samples a step where all ranks are there, `at_once` (default: all) at a time.

        A dataset that finds items by number is taken in an order that `seed` makes anew for each epoch, or as it is; a
        stream comes in its own order. Epochs follow one another without a gap, within a step where it falls so: nothing
        is dropped or filled up. Processes that read ahead: `workers`; a stream has one at most.

        What is drawn at random while a sample is made depends on `seed` and the sample alone, with workers and in
        streams. `first` is the number of samples that had been taken when this data took the place of other data.
        """
        self.batch = batch
        self.at_once = at_once or batch
        self.first = first
        self._dataset, self._seed = dataset, seed
        self._reading: dict[str, Any] = {"seed": seed, "workers": workers, "collate": collate, "pin_memory": pin_memory}
        self._order: Order | None = None
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            if len(dataset) == 0:
                raise too_small(batch, 0, self._name)
            self._order = Order(len(dataset), seed=seed, shuffle=shuffle)
        elif not hasattr(dataset, "__iter__"):
            raise failure(
                "data-not-a-dataset",
                f"a {self._name} is no dataset: it has neither __getitem__ with __len__, nor __iter__",
                exit_code=ExitCode.USAGE,
                remedy="give something with __len__ and __getitem__, or with __iter__",
            )

    @property
    def _name(self) -> str:
        return type(self._dataset).__name__

    @property
    def noticed(self) -> tuple[Finding, ...]:
        """What the dataset has to report of how it was read."""
        found: object = getattr(self._dataset, "noticed", ())
        if not isinstance(found, tuple):
            return ()
        return tuple(each for each in cast("tuple[object, ...]", found) if isinstance(each, Finding))

    def identity(self) -> dict[str, object]:
        """What makes sample number so and so what it is; a training goes on with data of the same only."""
        made = getattr(self._dataset, "fingerprint", None)
        dataset = made if isinstance(made, str) else self._name
        if self._order is None:
            return {"dataset": dataset, "first": self.first}
        order = f"{VERSION}, seed {self._seed}" if self._order.shuffled else "as it is"
        return {"dataset": dataset, "samples in an epoch": self._order.length, "order": order, "first": self.first}

    def read(self, plan: Plan, first: int, mark: Mark | None) -> Iterator[Any]:
        """The data of this rank's micro-batches, from the step on that begins with sample `first`."""
        if self._order is None:
            return streamed(self._dataset, plan, first - self.first, mark, **self._reading)
        if self._order.length < plan.global_batch:
            raise too_small(plan.global_batch, self._order.length, self._name)
        return numbered(self._dataset, self._order, plan, first - self.first, **self._reading)
