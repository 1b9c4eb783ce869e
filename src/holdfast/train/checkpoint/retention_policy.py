"""Which complete checkpoints to keep."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Keeps the newest `keep`, and permanently those whose step is a multiple of a number."""

    keep: int = 3
    keep_every_steps: int | None = None

    def expired(self, steps: Collection[int]) -> list[int]:
        """The steps whose checkpoints expire, oldest first."""
        old = sorted(steps)[: -self.keep]
        return [step for step in old if not (self.keep_every_steps and step % self.keep_every_steps == 0)]
