"""Samples for TorchTitan's loop: from its loader, or from one stream that all replicas share.

TorchTitan's loader reads this rank's shard of the data. Replicas come and go, so their samples are dealt by holdfast:
each is in exactly one committed step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX

from holdfast.train.data.elastic_data import Data
from holdfast.train.data.sharding import Batch
from holdfast.train.integrations import titan_private
from holdfast.train.integrations.titan_limits import other_shards_unsupported
from holdfast.train.session.session import Session

Given = tuple[dict[str, torch.Tensor], torch.Tensor]
"""What TorchTitan's loaders yield: inputs and labels."""


class LoaderPosition:
    """The position of TorchTitan's loader, for a Session's `state`."""

    def __init__(self, loader: Any, shards: int) -> None:
        """`shards` is the number of ranks that read different samples."""
        self._loader, self._shards = loader, shards

    def state_dict(self) -> dict[str, Any]:
        """The position, with the number of shards that it holds for."""
        return {"shards": self._shards, "loader": titan_private.loader_state(self._loader)}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue there; raises HoldfastError for another number of shards."""
        if state["shards"] != self._shards:
            raise other_shards_unsupported(state["shards"], self._shards)
        titan_private.load_loader_state(self._loader, state["loader"])


class SampleDealer:
    """Deals the samples of TorchTitan's dataset to the ranks of all replicas, step by step."""

    def __init__(self, dataset: Any, *, batch_size: int, micro_batch_size: int) -> None:
        """A rank takes `batch_size` samples a step when all replicas are there, `micro_batch_size` at a time."""
        self._data = Data(dataset, batch_size=batch_size, micro_batch_size=micro_batch_size)

    def deal(self, session: Session) -> list[Given]:
        """This rank's micro-batches of the current step."""
        return [to_titan(part) for part in session.batches(self._data)]


def to_titan(part: Batch) -> Given:
    """A micro-batch as TorchTitan has it.

    A rank that has run out of samples computes its first again, for the collectives in the model; they do not count.
    """
    inputs, labels = part.data
    return inputs, labels if part.loss_scale else torch.full_like(labels, IGNORE_INDEX)
