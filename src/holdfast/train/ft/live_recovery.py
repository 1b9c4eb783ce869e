"""Exports and imports model and optimizer state for live recovery between replicas.

All replicas shard the state alike, so a rank receives from the rank with the same number. Transport: replica_group.py.
Other state: replica_strategy.py.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from holdfast.train.checkpoint.train_state import TrainState


def export_state(train_state: TrainState) -> dict[str, Any]:
    """This rank's shard of model and optimizer state.

    The exported state does not change before the next optimizer step: tensors that the model may change are copied.
    """
    state = train_state.tensors()
    owned = {_local(parameter).data_ptr() for parameter in train_state.model.parameters()}
    model = {name: _unchanging(_local(value), owned) for name, value in state["model"].items()}
    return _local_tree(state) | {"model": model}


def import_state(train_state: TrainState, state: dict[str, Any]) -> None:
    """Load state exported by another replica."""
    own = train_state.tensors_to_load_into(state["optimizer"]["state"])
    train_state.load_tensors(_fill(own, state))


def _local(value: Any) -> Any:
    """This rank's shard of a tensor; other values unchanged."""
    return value.to_local().detach() if isinstance(value, DTensor) else value


def _unchanging(value: Any, owned: set[int]) -> Any:
    """The value, copied if it is a tensor in other memory than the parameters; a module's extra state may be none."""
    return value.clone() if isinstance(value, torch.Tensor) and value.data_ptr() not in owned else value


def _local_tree(tree: Any) -> Any:
    """The tree with this rank's shards in place of sharded tensors."""
    if isinstance(tree, dict):
        return {name: _local_tree(value) for name, value in cast("dict[Any, Any]", tree).items()}
    return [_local_tree(value) for value in cast("list[Any]", tree)] if isinstance(tree, list) else _local(tree)


def _fill(own: Any, received: Any) -> Any:
    """The received value; for a sharded tensor, this rank's own tensor filled with it."""
    if isinstance(received, dict):
        return {name: _fill(own.get(name), value) for name, value in cast("dict[Any, Any]", received).items()}
    if isinstance(received, list):
        return [_fill(*pair) for pair in zip(own, cast("list[Any]", received), strict=True)]
    if isinstance(own, DTensor) and isinstance(received, torch.Tensor):
        own.to_local().copy_(received)
        return own
    return received
