"""Step timeouts after which a rank counts as hung, derived from `recovery.step_timeout_s`.

`auto` derives them from the rank's own step durations, which are unknown at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

NON_STEP_FACTOR = 10.0
"""Factor on a fixed step timeout for the first step and for work between steps."""

AUTO_MAX_S = 600.0
"""`auto`: limit for the first step and for work between steps."""

AUTO_FACTOR, AUTO_MARGIN_S = 3.0, 0.75
"""`auto`: factor on the 99th percentile of the steps, plus a margin in seconds. Of the 1 s that a hang may cost, the
margin leaves 0.25 s to diagnose and stop the replica."""

EARLY_STEPS, EARLY_MARGIN_S = 8, 30.0
"""`auto`: any of the first EARLY_STEPS steps may recompile, which takes about as long as the first step, or up to
EARLY_MARGIN_S longer if that step's kernels were cached. torch.compile compiles a piece of code up to eight times
(`torch._dynamo.config.recompile_limit`); a rank restarted for it would recompile again and again."""


class StepTimeouts(Struct, frozen=True, kw_only=True):
    """Timeouts derived from `recovery.step_timeout_s`, in seconds."""

    step_timeout_s: float | Literal["auto"]

    @property
    def non_step_s(self) -> float:
        """Limit for an attempt's first step, which loads, compiles and connects, and for work between two steps."""
        return AUTO_MAX_S if self.step_timeout_s == "auto" else self.step_timeout_s * NON_STEP_FACTOR

    def first_step_s(self, longest_s: float) -> float:
        """Limit from an attempt's start to its first step, if the longest start so far took `longest_s`."""
        return (
            AUTO_FACTOR * longest_s + EARLY_MARGIN_S if self.step_timeout_s == "auto" else self.non_step_s + longest_s
        )

    def step_s(self, first_s: float, steps_s: Sequence[float]) -> float:
        """Limit for a step, after a first step of `first_s` and further steps of `steps_s`."""
        if self.step_timeout_s != "auto":
            return self.step_timeout_s
        if len(steps_s) < EARLY_STEPS:
            return min(AUTO_MAX_S, AUTO_FACTOR * max(first_s, *steps_s, 0.0) + EARLY_MARGIN_S)
        return AUTO_FACTOR * sorted(steps_s)[len(steps_s) * 99 // 100] + AUTO_MARGIN_S
