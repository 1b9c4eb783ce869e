"""Owns a learning rate that follows the number of ranks: the optimiser steps with another one than it is set to.

What it is set to stays as it is, so schedulers and checkpoints know nothing of it.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class LearningRateScaler:
    """Multiplies an optimiser's learning rates during its steps, once it is applied."""

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self._optimizer = optimizer
        self._factor = factor
        self._applied = factor == 1.0
        self._set: list[Any] = []

    def apply(self) -> None:
        """From the next step on; doing so again changes nothing."""
        if not self._applied:
            self._applied = True
            self._optimizer.register_step_pre_hook(self._scale)
            self._optimizer.register_step_post_hook(self._restore)

    def _scale(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        self._set = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self._factor

    def _restore(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        for group, rate in zip(optimizer.param_groups, self._set, strict=True):
            group["lr"] = rate
