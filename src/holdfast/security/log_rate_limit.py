"""Limits how often one log line repeats, so that unauthenticated clients cannot fill a disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MINUTE_S = 60.0


class LogRateLimit(logging.Filter):
    """Passes `lines_a_minute` lines of each kind per minute, and appends the count of dropped lines to the next one.

    Lines are of one kind if the same call in the source logs them.
    """

    def __init__(self, lines_a_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._allowed = lines_a_minute
        self._clock = clock
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}
        """Start of the current minute and number of lines in it, per kind."""

    def filter(self, record: logging.LogRecord) -> bool:
        now, kind = self._clock(), (record.pathname, record.lineno)
        since, count = self._counts.get(kind, (now, 0))
        if now - since >= MINUTE_S:
            if (kept_back := count - self._allowed) > 0:
                record.msg = f"{record.msg} (and {kept_back} more of this kind before)"
            since, count = now, 0
        self._counts[kind] = (since, count + 1)
        return count < self._allowed
