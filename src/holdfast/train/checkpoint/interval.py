"""Automatic checkpoint interval of one run, by Young's formula."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.failure_rates import DAY_S, DEFAULT_RATE, FailureHistory, mtbf_s, young_interval_s
from holdfast.findings import Finding, Severity

FIRST_INTERVAL_S = 60.0
"""Used until the first save shows its cost."""
REPORT_RATIO = 1.25
"""Minimum ratio of change in the interval that is reported."""


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
