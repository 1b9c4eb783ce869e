"""Which complete checkpoints to keep."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Keeps the newest `keep`, and permanently those whose step is a multiple of a number."""

    keep: int = 3
    keep_every_steps: int | None = None

    def expired(self, steps: Collection[int], agreed_step: int | None = None) -> list[int]:
        """The steps whose checkpoints expire, oldest first.

        The newest up to `agreed_step` does not: the run falls back to it if replicas are found to differ.
        """
        old = sorted(steps)[: -self.keep]
        agreed = max((step for step in steps if agreed_step is not None and step <= agreed_step), default=None)
        permanent = self.keep_every_steps
        return [step for step in old if step != agreed and not (permanent and step % permanent == 0)]
