"""Owns the state of model and optimiser on its way from one replica's memory to another's: lent as it lies, copied in.

Both are shared out among their ranks in the same way, so a rank takes from the rank of its own number. Refuses to own
the way (peers.py), and what else goes along (replicas.py).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from holdfast.train.training import Training


def lend(training: Training) -> dict[str, Any]:
    """This rank's part of the model and the optimiser; the optimiser's once it has stepped.

    Nothing in it changes before the optimiser steps: what the model itself may change is copied.
    """
    # One that has not stepped would be made to by torch, and count it.
    state = training.tensors() if training.optimizer.state else {"model": get_model_state_dict(training.model)}
    owned = {_local(parameter).data_ptr() for parameter in training.model.parameters()}
    model = {
        name: _local(tensor) if _local(tensor).data_ptr() in owned else _local(tensor).clone()
        for name, tensor in state["model"].items()
    }
    return {"model": model} | ({"optimizer": _plain(state["optimizer"])} if "optimizer" in state else {})


def take(training: Training, lent: dict[str, Any]) -> None:
    """Go on from what another lends."""
    if "optimizer" in lent:
        training.take(_filled(training.tensors(), lent))
    else:
        set_model_state_dict(training.model, _filled(get_model_state_dict(training.model), lent["model"]))


def _local(value: Any) -> Any:
    """This rank's part of a tensor; anything else as it is."""
    return value.to_local().detach() if isinstance(value, DTensor) else value


def _plain(tree: Any) -> Any:
    """The same with this rank's parts in place of sharded tensors."""
    if isinstance(tree, dict):
        return {name: _plain(value) for name, value in cast("dict[Any, Any]", tree).items()}
    return [_plain(value) for value in cast("list[Any]", tree)] if isinstance(tree, list) else _local(tree)


def _filled(own: Any, lent: Any) -> Any:
    """What was lent, and where this rank has a sharded tensor that one, with what was lent in it."""
    if isinstance(lent, dict):
        return {name: _filled(own.get(name), value) for name, value in cast("dict[Any, Any]", lent).items()}
    if isinstance(lent, list):
        return [_filled(*pair) for pair in zip(own, cast("list[Any]", lent), strict=True)]
    if isinstance(own, DTensor) and isinstance(lent, torch.Tensor):
        own.to_local().copy_(lent)
        return own
    return lent
