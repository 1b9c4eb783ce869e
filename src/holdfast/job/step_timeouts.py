"""Owns how long a rank may be silent before it counts as hung, all of it out of `recovery.step_timeout_s`.

A number is the job's own word. `auto` goes by the rank's own steps, of which nothing is known at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

NON_STEP_FACTOR = 10.0
"""What is no ordinary step may take so many step deadlines, where the job names one."""

AUTO_MAX_S = 600.0
"""`auto`: longest for what is no ordinary step."""

AUTO_FACTOR, AUTO_MARGIN_S = 3.0, 0.75
"""`auto`: so many times the 99th percentile of the steps, and so many seconds. A quarter of the second that a hang may
cost is left for its replica to be judged and ended."""

EARLY_STEPS, EARLY_MARGIN_S = 8, 30.0
"""`auto`: until so many steps are known any of them may compile again, which takes about as long as the first did, or
so much longer where that one's kernels were cached. torch.compile tries a piece of code eight times
(`torch._dynamo.config.recompile_limit`); and a rank that was restarted for it would compile again, and again."""


@dataclass(frozen=True, kw_only=True)
class StepTimeouts:
    """What `recovery.step_timeout_s` comes to, in seconds."""

    step_timeout_s: float | Literal["auto"]

    @property
    def non_step_s(self) -> float:
        """For an attempt's first step, which loads, compiles and connects; and for what comes between two steps."""
        return AUTO_MAX_S if self.step_timeout_s == "auto" else self.step_timeout_s * NON_STEP_FACTOR

    def first_step_s(self, longest_s: float) -> float:
        """For an attempt from its start to its first step, where the longest so far took `timeout_s`."""
        return (
            AUTO_FACTOR * longest_s + EARLY_MARGIN_S if self.step_timeout_s == "auto" else self.non_step_s + longest_s
        )

    def step_s(self, first_s: float, steps_s: Sequence[float]) -> float:
        """For a step, after a first one that took `first_step_s` and others that took `step_durations_s`."""
        if self.step_timeout_s != "auto":
            return self.step_timeout_s
        if len(steps_s) < EARLY_STEPS:
            return min(AUTO_MAX_S, AUTO_FACTOR * max(first_s, *steps_s, 0.0) + EARLY_MARGIN_S)
        return AUTO_FACTOR * sorted(steps_s)[len(steps_s) * 99 // 100] + AUTO_MARGIN_S
