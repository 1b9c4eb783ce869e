"""Exports and imports model and optimiser state for live recovery between replicas.

All replicas shard the state alike, so a rank receives from the rank with the same number. Transport: replica_group.py.
Other state: replica_strategy.py.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from holdfast.train.checkpoint.train_state import TrainState


def export_state(train_state: TrainState) -> dict[str, Any]:
    """This rank's shard of model and optimiser state; the optimiser's only after its first step.

    The exported state does not change before the next optimiser step: tensors that the model may change are copied.
    """
    # Torch would initialise the state of a fresh optimiser by a step, and count that step.
    state = train_state.tensors() if train_state.optimizer.state else {"model": get_model_state_dict(train_state.model)}
    owned = {_local(parameter).data_ptr() for parameter in train_state.model.parameters()}
    model = {
        name: _local(tensor) if _local(tensor).data_ptr() in owned else _local(tensor).clone()
        for name, tensor in state["model"].items()
    }
    modules = {name: get_model_state_dict(each) for name, each in train_state.modules.items()}
    exported = {"model": model, "state": _local_tree(modules)}
    return exported | ({"optimizer": _local_tree(state["optimizer"])} if "optimizer" in state else {})


def import_state(train_state: TrainState, state: dict[str, Any]) -> None:
    """Load state exported by another replica."""
    modules = {name: get_model_state_dict(each) for name, each in train_state.modules.items()}
    if "optimizer" in state:
        train_state.load_tensors(_fill(train_state.tensors(), state))
    else:
        set_model_state_dict(train_state.model, _fill(get_model_state_dict(train_state.model), state["model"]))
        train_state.load_modules(_fill(modules, state["state"]))


def _local(value: Any) -> Any:
    """This rank's shard of a tensor; other values unchanged."""
    return value.to_local().detach() if isinstance(value, DTensor) else value


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
