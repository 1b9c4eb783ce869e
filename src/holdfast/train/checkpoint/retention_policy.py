"""Owns which complete checkpoints are kept. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """The newest so many, and for good those whose step is a multiple of a number."""

    keep: int = 3
    keep_every_steps: int | None = None

    def expired(self, steps: Collection[int]) -> list[int]:
        """Of these steps those whose checkpoints go, oldest first."""
        old = sorted(steps)[: -self.keep]
        return [step for step in old if not (self.keep_every_steps and step % self.keep_every_steps == 0)]
