"""Faults that a drill injects inside a rank, because no signal can cause them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from holdfast.events import FaultTarget
from holdfast.protocol.rank_messages import InjectRankFault, RankFault
from holdfast.train.ft.bit_flip import flip_bit
from holdfast.train.ft.lasting_faults import LastingFaults
from holdfast.train.metrics.phase_clock import PhaseClock
from holdfast.train.metrics.step_meter import StepMeter

FOR_GOOD = timedelta(days=7)


class InjectedFaultError(RuntimeError):
    """The injected exception."""


class RankFaults:
    """The faults of one rank; those of its numbers hit the next step, through hooks of its model."""

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        meter: StepMeter | None = None,
        phases: PhaseClock | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._flips = 0
        """Flipped bits so far, each at another place."""
        self._lasting = None
        if model is not None and optimizer is not None and meter is not None:  # a compiled model has no truth value
            self._lasting = LastingFaults(model, optimizer, meter, phases)

    def inject(self, drill: InjectRankFault) -> None:
        """Inject a fault in the training thread, between two steps."""
        match drill.fault:
            case RankFault.NAN:
                self._scale(drill.target, math.nan)
            case RankFault.BITFLIP:
                self._flip(FaultTarget(drill.target))
            case RankFault.SPIKE:
                self._scale(drill.target, drill.amount or 1.0)
            case RankFault.SLOW | RankFault.DATA_STALL | RankFault.LEAK:
                if self._lasting is not None:
                    self._lasting.inject(drill)
            case _:
                _FAULTS[drill.fault]()

    def _flip(self, target: FaultTarget) -> None:
        """Flip a bit of the state now, or of what each later step computes, as a device with a defect does."""
        if self._model is None or self._optimizer is None:
            return
        seed, random = self._flips, Random(self._flips)
        self._flips += 1
        trained: list[torch.Tensor] = [
            each for each in self._optimizer.param_groups[-1]["params"] if each.requires_grad
        ]
        match target:
            case FaultTarget.WEIGHTS:
                flip_bit(trained[random.randrange(len(trained))], random)
            case FaultTarget.OPTIMIZER:
                values = (value for each in self._optimizer.state.values() for value in each.values())
                averages = [value for value in values if isinstance(value, torch.Tensor) and value.ndim]
                if averages:
                    flip_bit(averages[random.randrange(len(averages))], random)
            case FaultTarget.GRADIENT:
                cast("Any", trained[-1]).register_hook(partial(_flipped, seed=seed))
            case _:
                layer = _layer_of(self._model, trained[-1])
                layer.register_forward_hook(lambda _module, _given, output: _flipped(output, seed))

    def on_step(self) -> None:
        """Do what faults that last do between two steps."""
        if self._lasting is not None:
            self._lasting.on_step()

    def _scale(self, target: str, factor: float) -> None:
        """Multiply what the model computes in the next step: its output, or the gradient of one parameter."""
        if self._model is None or self._optimizer is None:
            return

        def scale(*given: Any) -> Any:
            return _scaled(given[-1], factor)  # the gradient, or the output after the module and its arguments

        if target == FaultTarget.GRADIENT:
            last: torch.Tensor = [each for each in self._optimizer.param_groups[-1]["params"] if each.requires_grad][-1]
            _once(cast("Callable[..., Any]", last.register_hook), scale)
        else:
            _once(self._model.register_forward_hook, scale)


def _once(register: Callable[..., Any], change: Callable[..., Any]) -> None:
    """Register a hook that removes itself when it is called."""

    def hook(*given: Any) -> Any:
        handle.remove()
        return change(*given)

    handle = register(hook)


def _scaled(value: Any, factor: float) -> Any:
    """What a model computes, with its floating-point tensors multiplied."""
    if isinstance(value, torch.Tensor):
        return value * factor if value.is_floating_point() else value
    if isinstance(value, MutableMapping):  # changed in place: a ModelOutput has its own constructor
        named = cast("MutableMapping[str, Any]", value)
        named.update({name: _scaled(each, factor) for name, each in named.items()})
        return named
    if isinstance(value, list | tuple):
        return [*map(partial(_scaled, factor=factor), cast("Sequence[Any]", value))]
    return value


def _layer_of(model: nn.Module, parameter: torch.Tensor) -> nn.Module:
    """The module that has this parameter itself."""
    return next(each for each in model.modules() if any(own is parameter for own in each.parameters(recurse=False)))


def _flipped(value: Any, seed: int) -> Any:
    """A copy of a tensor with a flipped bit: of equal tensors it is the same one."""
    if not isinstance(value, torch.Tensor):
        return value
    changed = value.clone()
    flip_bit(changed, Random(seed))
    return changed


def _raise() -> None:
    raise InjectedFaultError("a drill: an error of the program's own")


def _hang() -> None:
    while True:
        time.sleep(3600)


def _all_reduce_alone() -> None:
    """All-reduce with a peer that never joins; uses a separate group, so that no other collective pairs with it."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 2, FOR_GOOD)
    group.allreduce(torch.zeros(1)).wait()


_FAULTS: Mapping[RankFault, Callable[[], None]] = {
    RankFault.RAISE: _raise,
    RankFault.HANG: _hang,
    RankFault.COLLECTIVE: _all_reduce_alone,
}
