"""Faults that a drill injects into every step of a rank for a while: a phase that takes longer, memory that leaks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.protocol.phase_times import Phase
from holdfast.protocol.rank_messages import InjectRankFault, RankFault
from holdfast.train.metrics.phase_clock import PhaseClock
from holdfast.train.metrics.step_meter import StepMeter

MIB = 2**20


class LastingFaults:
    """The lasting faults of one rank; `on_step` is called between steps."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, meter: StepMeter, phases: PhaseClock | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._meter = meter
        self._phases = phases
        self._on_step: list[Callable[[], None]] = []
        self._leaked: list[bytes] = []

    def inject(self, drill: InjectRankFault) -> None:
        """Begin a fault, which lasts for `for_s` seconds, or as long as the rank."""
        until = math.inf if drill.for_s is None else time.monotonic() + drill.for_s
        amount = drill.amount or 0.0
        if drill.fault is RankFault.LEAK:
            # not zeros, which need no memory
            self._on_step.append(_before(until, lambda: self._leaked.append(b"\1" * int(amount * MIB))))
        elif drill.fault is RankFault.DATA_STALL:
            self._meter.before_item = _before(until, lambda: time.sleep(amount))
        else:
            delay_s = (amount - 1) * (self._phases.own_s if self._phases else 0.0)
            self._slow(Phase(drill.target), _before(until, lambda: time.sleep(delay_s)))

    def on_step(self) -> None:
        """Do what happens between two steps."""
        for each in self._on_step:
            each()

    def _slow(self, phase: Phase, delay: Callable[[], None]) -> None:
        """Delay a phase of every step."""

        def hook(*_: Any) -> None:
            delay()

        # The last parameter of the optimizer has its gradient before the backward pass ends.
        last: torch.Tensor = [each for each in self._optimizer.param_groups[-1]["params"] if each.requires_grad][-1]
        match phase:
            case Phase.DATA:
                self._meter.before_item = delay
            case Phase.FORWARD:
                self._model.register_forward_pre_hook(hook)
            case Phase.BACKWARD:
                cast("Any", last).register_hook(hook)
            case Phase.OPTIMIZER:
                self._optimizer.register_step_pre_hook(hook)
            case Phase.COMMUNICATION:
                # Not while the gradients are sent: a delay then costs only what it exceeds the sending by.
                if self._phases is not None:
                    self._phases.after_reduction = delay
            case Phase.HOST:
                self._on_step.append(delay)


def _before(until: float, act: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        if time.monotonic() < until:
            act()

    return call
