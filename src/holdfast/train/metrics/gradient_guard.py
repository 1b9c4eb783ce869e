"""Finds NaN and infinities in one rank's gradients before they are reduced, and in its weights and optimizer state.

After DDP's all-reduce every rank has the NaN of one. So a hook sums each gradient as soon as it is accumulated, which
is before DDP reduces it: one small operation for a small parameter, and one pass over memory for a large one. A sum is
finite if all its terms are, unless they nearly overflow; weights, which decide what follows, are examined element by
element, and only after a loss or a gradient that is no number. FSDP accumulates reduced shards: there the rank of a
gradient is the shard's owner, and only the loss tells which rank was first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

SUM = "local_gradient_sum"
"""Name under which the sum travels with a step's numbers; it is no metric, and not reported."""


class Place(NamedTuple):
    """A parameter of the optimizer."""

    group: int
    name: str

    def __str__(self) -> str:
        return f"{self.group} ({self.name})" if self.name else str(self.group)


class GradientGuard:
    """Watches the parameters of one rank's optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        names = {id(parameter): name.removeprefix("module.") for name, parameter in model.named_parameters()}
        self._optimizer = optimizer
        self._parameters = [
            (Place(index, names.get(id(parameter), "")), parameter)
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad and parameter.is_floating_point()
        ]
        self.sees_own_gradients = not any(isinstance(parameter, DTensor) for _, parameter in self._parameters)
        """Whether gradients are seen before other ranks add theirs; a shard of FSDP has been reduced."""
        device = _local(self._parameters[0][1]).device if self._parameters else None
        self._sums: list[torch.Tensor] = [torch.zeros(len(self._parameters), device=device) for _ in range(2)]
        """Of this step and of the last one, whose sum a GPU may deliver only now."""
        self._slots = [sums.unbind() for sums in self._sums]
        """Their elements: to index a tensor costs half as much as a small sum."""
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_hook(self._slots, number))
            for number, (_, parameter) in enumerate(self._parameters)
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def end_step(self) -> Mapping[str, torch.Tensor]:
        """The sum of all gradients of the step, and a new start for the next step's."""
        self._sums.reverse()
        self._slots.reverse()
        self._sums[0].zero_()
        return {SUM: self._sums[1].sum()} if self._parameters else {}

    def gradient(self) -> Place | None:
        """The first parameter, in the optimizer's order, whose gradient in the last step was no number."""
        return self._first(~torch.isfinite(self._sums[1]))

    def damage(self) -> tuple[str, Place] | None:
        """Whether `weights` or `optimizer` state are no numbers now, and the first parameter of which they are."""
        for place, parameter in self._parameters:
            if not _is_finite([parameter]):
                return "weights", place
            state: dict[str, Any] = self._optimizer.state.get(parameter, {})
            if not _is_finite(value for value in state.values() if isinstance(value, torch.Tensor)):
                return "optimizer", place
        return None

    def _first(self, bad: torch.Tensor) -> Place | None:
        found = bad.nonzero()
        return self._parameters[int(found[0])][0] if len(found) else None


def _hook(slots: Sequence[Sequence[torch.Tensor]], number: int) -> Any:
    """Sums a gradient into the first slots; a hook that held its own parameter would keep it forever."""

    def add(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            gradient = _local(parameter.grad)
            if gradient.layout is not torch.strided:
                gradient = gradient.coalesce().values()
            slot = slots[0][number]
            if gradient.device == slot.device:
                torch.sum(gradient, dim=tuple(range(gradient.ndim)), dtype=slot.dtype, out=slot)
            else:
                slot.copy_(gradient.sum())

    return add


def is_sound(step_sum: float | None) -> bool:
    """Whether the gradients that add up to this are numbers."""
    return step_sum is None or math.isfinite(step_sum)


def _is_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(_local(tensor.detach())).all()) for tensor in tensors if tensor.is_floating_point())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
