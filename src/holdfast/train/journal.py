"""Owns where a run's metrics go beside its controller: lines for who watches a run that nobody supervises.

Rank 0's figures. Refuses to own what they are (meter.py), and the wire to the agent (channel.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from holdfast.measure.words import told

LINE_EVERY_S = 10.0
"""Seconds between two lines."""


class Lines:
    """A line on standard output now and then, the first after the first step."""

    def __init__(self) -> None:
        self._written_at = -LINE_EVERY_S

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._written_at < LINE_EVERY_S:
            return
        self._written_at = now
        sys.stdout.write(f"step {step}: {', '.join(told(metrics))}\n")
        sys.stdout.flush()
