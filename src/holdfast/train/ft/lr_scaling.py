"""Scales the learning rate with the world size, during optimizer steps only.

The configured learning rate is restored after each step, so schedulers and checkpoints never see the scaling.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class LearningRateScaler:
    """Multiplies an optimizer's learning rates during its steps, once applied."""

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self._optimizer = optimizer
        self._factor = factor
        self._applied = factor == 1.0
        self._set: list[Any] = []

    def apply(self) -> None:
        """Apply from the next step on; idempotent."""
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
