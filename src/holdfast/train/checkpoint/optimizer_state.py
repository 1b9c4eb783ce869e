"""Optimizer state of exactly the parameters that have some.

A parameter has none before its first gradient, as in an unused or frozen layer, or while a gradient scaler skips every
step. Torch would create the state of a fresh optimizer, for all parameters that require gradients, both when it is
saved and when it is loaded: by a step, which would count.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer


@contextmanager
def none_created(optimizer: Optimizer) -> Generator[None]:
    """Keep torch's functions from creating state; they never do if a parameter has a gradient."""
    parameters = [] if optimizer.state else _parameters(optimizer)
    smallest = min((each for each in parameters if each.requires_grad), key=torch.Tensor.numel, default=None)
    if smallest is None or any(each.grad is not None for each in parameters):
        yield
        return
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


def state_to_load_into(model: Module, optimizer: Optimizer, names: Collection[str]) -> dict[str, Any]:
    """The optimizer's state dict, with state for exactly these of its parameters; created where there is none."""
    current = _state_dict(model, optimizer)
    missing = [each for each in _named(current, optimizer, names) if not optimizer.state.get(each)]
    if missing:
        _create(optimizer, missing)
        current = _state_dict(model, optimizer)
    current["state"] = {name: values for name, values in current["state"].items() if name in names}
    return current


def load(model: Module, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load such a state dict; parameters that have no state in it have none afterwards."""
    having = {id(each) for each in _named(_state_dict(model, optimizer), optimizer, state_dict["state"])}
    with none_created(optimizer), _requiring_gradients(_parameters(optimizer), having):
        # Not strict for legacy FSDP, where one flat parameter stands for several of which some may have no state.
        set_optimizer_state_dict(model, optimizer, state_dict, options=StateDictOptions(strict=False))


@contextmanager
def _requiring_gradients(parameters: Sequence[torch.Tensor], these: Collection[int]) -> Generator[None]:
    """Let just these (by id) require gradients: torch loads the state of all that do, and of no others."""
    changed = [each for each in parameters if each.requires_grad != (id(each) in these)]
    for each in changed:
        each.requires_grad_(not each.requires_grad)
    try:
        yield
    finally:
        for each in changed:
            each.requires_grad_(not each.requires_grad)


def _state_dict(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    with none_created(optimizer):
        return cast("dict[str, Any]", get_optimizer_state_dict(model, optimizer))


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _named(state_dict: dict[str, Any], optimizer: Optimizer, names: Collection[str]) -> list[torch.Tensor]:
    """The parameters of these names; the state dict is the optimizer's own."""
    own = [name for group in state_dict["param_groups"] for name in group["params"]]
    parameters = _parameters(optimizer)
    if len(own) != len(parameters):  # legacy FSDP has flattened several into one: as torch does, take all
        return [each for each in parameters if each.requires_grad]
    return [each for name, each in zip(own, parameters, strict=True) if name in names]


def _create(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Create the state of these parameters by a step with gradients and learning rates of 0."""
    gradients = [(each, each.grad) for each in _parameters(optimizer)]
    groups = [group for group in optimizer.param_groups if "lr" in group]
    rates = [group["lr"] for group in groups]
    try:
        for each, _ in gradients:
            each.grad = None
        for each in parameters:
            each.grad = torch.zeros_like(each)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for each, gradient in gradients:
            each.grad = gradient
