"""Automatic checkpoint interval by Young's formula, which minimises the expected time lost.

With C seconds that a save stalls the loop and M seconds between failures, saving every sqrt(2 C M) seconds makes the
time spent on saves equal to the work lost to failures (J. W. Young, CACM 17 (9), 1974). J. T. Daly's further terms
(FGCS 22 (3), 2006) matter only where C is near M; a stall is far shorter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.failure_rates import DAY_S, DEFAULT_RATE
from holdfast.findings import Finding, Severity

FIRST_INTERVAL_S = 60.0
"""Used until the first save shows its cost."""
REPORT_RATIO = 1.25
"""Minimum ratio of change in the interval that is reported."""


@dataclass(frozen=True, kw_only=True)
class FailureHistory:
    """A run's failures so far."""

    nodes: int
    """Current number of nodes."""
    failures: int
    """Attempts that have ended."""
    node_s: float
    """Seconds of training, summed over nodes."""


def mtbf_s(past: FailureHistory) -> float:
    """Mean seconds between failures of the whole run; the prior counts as one failure, in addition to the run's own."""
    prior_node_s = 1000 / DEFAULT_RATE.per_1000_node_days * DAY_S
    return (prior_node_s + past.node_s) / (1 + past.failures) / past.nodes


def young_interval_s(past: FailureHistory, *, cost_s: float, took_s: float) -> float:
    """Seconds between the starts of two saves that stall the loop `cost_s` and complete after `took_s`."""
    return max(math.sqrt(2 * cost_s * mtbf_s(past)), took_s)


class YoungInterval:
    """One run's interval, updated after each save; every rank has one, and rank 0's is used."""

    def __init__(self, *, nodes: int, failures: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.every_s = FIRST_INTERVAL_S
        self._nodes = nodes
        self._failures = failures
        self._clock = clock
        self._since = clock()
        self._earlier_node_s = 0.0
        self._cost_s = 0.0
        self._reported_s = 0.0

    @property
    def node_s(self) -> float:
        """Seconds of training so far, summed over nodes."""
        return self._earlier_node_s + self._nodes * (self._clock() - self._since)

    def restore_node_s(self, node_s: float) -> None:
        """Set the node seconds that the run trained before this attempt."""
        self._earlier_node_s = node_s

    def add_stall(self, seconds: float) -> None:
        """Add seconds that the loop waited for a checkpoint."""
        self._cost_s += seconds

    def on_saved(self, *, took_s: float) -> Finding | None:
        """Update the interval after a complete save; returns a finding if it differs from the last one reported."""
        past = FailureHistory(nodes=self._nodes, failures=self._failures, node_s=self.node_s)
        cost_s, self._cost_s = self._cost_s, 0.0
        self.every_s = young_interval_s(past, cost_s=cost_s, took_s=took_s)
        if self._reported_s and 1 / REPORT_RATIO <= self.every_s / self._reported_s <= REPORT_RATIO:
            return None
        self._reported_s = self.every_s
        return Finding(
            code="checkpoint-interval",
            severity=Severity.INFO,
            what=f"`checkpoint.every: auto` takes a checkpoint every {self.every_s:.1f} s",
            evidence=(
                f"one costs the loop {cost_s:.3g} s and is complete after {took_s:.3g} s",
                f"on {self._nodes} nodes a failure is expected every {mtbf_s(past) / 3600:.3g} h: "
                f"{self._failures} so far in {past.node_s / DAY_S:.3g} node-days; "
                f"{DEFAULT_RATE.fleet} had {DEFAULT_RATE.per_1000_node_days} in 1,000",
            ),
        )
