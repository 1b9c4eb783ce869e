"""`Data`: the public description of a loop's dataset and its batches.

Reading: map_style.py, iterable.py. Position in the training: prefetcher.py, session.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch.utils.data import default_collate  # pyright: ignore[reportUnknownVariableType] - lists of anything

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding
from holdfast.train.data.index_shuffle import VERSION, IndexShuffle
from holdfast.train.data.iterable import ResumePoint, dataset_too_small, read_stream
from holdfast.train.data.map_style import read_map_style
from holdfast.train.data.sharding import ShardPlan
from holdfast.train.data.stream_iterator import StreamIterator


class Data:
    """A dataset for `Session.batches`: every sample is in exactly one committed step, also across failures.

    ::

        data = Data(dataset, batch_size=8, num_workers=2)
        for step in session.steps(1000):
            for micro in session.batches(data):
                (loss_of(model, micro.data) * micro.loss_scale).backward()
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        micro_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
        pin_memory: bool = False,
        start_sample: int = 0,
    ) -> None:
        """A rank takes `batch_size` samples a step when all ranks are present.

        It computes `micro_batch_size` of them at a time (default: all).

        `shuffle` reads a map-style dataset in a new order for each epoch, derived from `seed`; a stream keeps its own
        order. Epochs follow one another without a gap, also within a step: no sample is dropped or padded.
        `num_workers` processes prefetch; a stream uses at most one.

        Random numbers drawn while a sample is made depend only on `seed` and the sample, also in workers and streams.
        `start_sample` is the number of samples already trained on when this data replaces other data.
        """
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size or batch_size
        self.start_sample = start_sample
        self._dataset, self._seed = dataset, seed
        self._loader_options: dict[str, Any] = {
            "seed": seed,
            "workers": num_workers,
            "collate": collate,
            "pin_memory": pin_memory,
        }
        self._order: IndexShuffle | None = None
        self._unread: Any = None
        """The state of a stream before its first sample: without workers, reading changes the stream itself."""
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            if len(dataset) == 0:
                raise dataset_too_small(batch_size, 0, self._name)
            self._order = IndexShuffle(len(dataset), seed=seed, shuffle=shuffle)
        elif not hasattr(dataset, "__iter__"):
            raise failure(
                "data-not-a-dataset",
                f"a {self._name} is no dataset: it has neither __getitem__ with __len__, nor __iter__",
                exit_code=ExitCode.USAGE,
                remedy="give something with __len__ and __getitem__, or with __iter__",
            )
        elif hasattr(dataset, "load_state_dict"):
            self._unread = StreamIterator.state_of(dataset)

    @property
    def _name(self) -> str:
        return type(self._dataset).__name__

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of the dataset about how it was read."""
        found: object = getattr(self._dataset, "findings", ())
        if not isinstance(found, tuple):
            return ()
        return tuple(each for each in cast("tuple[object, ...]", found) if isinstance(each, Finding))

    def identity(self) -> dict[str, object]:
        """Identifies which sample each number stands for; a run resumes only with data of the same identity."""
        made = getattr(self._dataset, "fingerprint", None)
        dataset = made if isinstance(made, str) else self._name
        if self._order is None:
            return {"dataset": dataset, "first": self.start_sample}
        order = f"{VERSION}, seed {self._seed}" if self._order.shuffled else "as it is"
        return {
            "dataset": dataset,
            "samples in an epoch": self._order.length,
            "order": order,
            "first": self.start_sample,
        }

    def read(self, plan: ShardPlan, first: int, resume_point: ResumePoint | None) -> Iterator[Any]:
        """The data of this rank's micro-batches, starting with the step whose first sample is `first`."""
        if self._order is None:
            return read_stream(
                self._dataset,
                plan,
                first - self.start_sample,
                resume_point,
                unread=self._unread,
                **self._loader_options,
            )
        if self._order.length < plan.global_batch:
            raise dataset_too_small(plan.global_batch, self._order.length, self._name)
        return read_map_style(self._dataset, self._order, plan, first - self.start_sample, **self._loader_options)
