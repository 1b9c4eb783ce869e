"""Guards against NaN and infinite losses, and reports other metrics that are not finite.

After such a loss the loop continues, because many loops skip a bad batch. Meanwhile no checkpoint is taken, as the
state may be damaged and would replace a good checkpoint. After `MAX_IN_A_ROW` such steps the loop ends, to restart from
the last good one. How all ranks agree: rank_coordinator.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from holdfast.findings import Finding, Severity, replica_suffix

MAX_IN_A_ROW = 20
"""Loops that skip bad batches or scale losses have a few in a row at most."""
REPORT_AGAIN_S = 60.0
"""Minimum seconds between two reports about an intermittent loss."""
_FOLLOWS = f". None is taken while it lasts, and {MAX_IN_A_ROW} such steps in a row end the loop"

SKIPPED = Finding(
    code="checkpoint-skipped-nonfinite",
    severity=Severity.WARNING,
    what="no checkpoint was taken: a loss is no number",
    remedy="see `loss-not-finite`; the newest checkpoint is of before, and none is taken until all losses are numbers",
)
"""Reported for the first skipped checkpoint of a series."""


def skipped(count: int) -> Finding:
    """Reported at the end of a series, for the other skipped checkpoints."""
    return Finding(
        code="checkpoint-skipped-nonfinite",
        severity=Severity.INFO,
        what=f"{count} checkpoints in a row were not taken: a loss was no number",
        remedy="see `loss-not-finite`",
    )


class NonFiniteGuard:
    """Checks one rank's metrics, step by step."""

    def __init__(self, rank: int, replica: int = 0) -> None:
        self._rank = rank
        self._who = f"rank {rank}{replica_suffix(replica)}"
        self._in_a_row = 0
        self._last_good: tuple[float, int] | None = None
        """The last finite loss, and its step."""
        self._reported_at = -math.inf
        self._reported_names: set[str] = set()

    @property
    def is_finite(self) -> bool:
        """Whether the last step's loss was finite."""
        return self._in_a_row == 0

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Findings about a step's metrics; an error among them ends the loop."""
        loss = metrics.get("loss")
        found: list[Finding] = []
        if loss is not None and math.isfinite(loss):
            self._in_a_row, self._last_good = 0, (loss, step)
        elif loss is not None:
            self._in_a_row += 1
            finding = self._loss(step, metrics)
            begins = self._in_a_row == 1 and time.monotonic() - self._reported_at >= REPORT_AGAIN_S
            if begins or self._in_a_row == MAX_IN_A_ROW:
                self._reported_at = time.monotonic()
                found.append(finding)
        if self._rank or all(map(math.isfinite, metrics.values())):
            return found
        return found + self._others(step, metrics)

    def _others(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Each name is reported once, by rank 0, whose values are displayed."""
        none = {name for name, value in metrics.items() if name != "loss" and not math.isfinite(value)}
        fresh = sorted(none - self._reported_names)
        self._reported_names |= none
        return [_other(self._who, step, name, metrics[name]) for name in fresh]

    def _loss(self, step: int, metrics: Mapping[str, float]) -> Finding:
        over = self._in_a_row >= MAX_IN_A_ROW
        norm = f"gradient norm {metrics['grad_norm']:g}" if "grad_norm" in metrics else ""
        before = "none before it, since this start, was a number"
        if self._last_good is not None:
            before = "before that: loss {:.6g} after step {}".format(*self._last_good)
        return Finding(
            code="loss-not-finite",
            severity=Severity.ERROR if over else Severity.WARNING,
            what=f"the loss of {self._who} is {metrics['loss']:g} after step {step}"
            + (f", and was no number in {self._in_a_row} steps: the loop ends" if over else ""),
            where=self._who,
            evidence=tuple(filter(None, (norm, before))),
            remedy="resume from the newest checkpoint, which is older, with a lower learning rate, clipped "
            "gradients, or without the samples of that step; if it does not come again with the same samples, suspect "
            f"the device{'' if over else _FOLLOWS}",
        )


def _other(who: str, step: int, name: str, value: float) -> Finding:
    return Finding(
        code="metric-not-finite",
        severity=Severity.INFO,
        what=f"{name} is {value:g} after step {step}: such figures are left out of what is shown",
        where=who,
        remedy="nothing, if that is what it should be",
    )
