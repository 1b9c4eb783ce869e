"""Owns how metrics reach a tracker: in a thread of its own, so that one that is slow, broken or gone stops no training.

The loop puts a step down and goes on. What a tracker does wrong is noted once, for the loop to say, since only its
thread speaks to the agent. Refuses to own what a tracker is told (trackers.py).
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from holdfast.findings import Finding, Severity
from holdfast.train.metrics.trackers import TrackedRun, Tracker

BACKLOG_STEPS = 10_000
"""What a tracker may be behind; about 20 MB."""
CLOSE_S = 20.0
"""Longest that a process which is done waits for a tracker to take the rest."""

_QueuedStep = tuple[int, Mapping[str, float]]


class AsyncTracker:
    """Carries steps to one tracker, in order."""

    def __init__(self, name: str, tracker: Tracker, tracked_run: TrackedRun) -> None:
        self._name = name
        self._tracker = tracker
        self._tracked_run = tracked_run
        self._queue: queue.Queue[_QueuedStep | None] = queue.Queue(BACKLOG_STEPS)
        self._findings: queue.SimpleQueue[Finding] = queue.SimpleQueue()
        self._failed = self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"holdfast-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Have a step carried; dropped where the tracker is too far behind."""
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            self._fail(f"is {BACKLOG_STEPS:,} steps behind, and misses those that follow", "")

    def take_finding(self) -> Finding | None:
        """What is to be said of the tracker, once."""
        return None if self._findings.empty() else self._findings.get()

    def close(self) -> None:
        """Have the rest carried, as far as that takes no more than `CLOSE_S`; a second call does nothing."""
        if self._closed or self._thread is threading.current_thread() or not self._thread.is_alive():
            return
        self._closed, until = True, time.monotonic() + CLOSE_S
        with suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
            self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"was not done with all metrics {CLOSE_S:g} s after the last step", "")

    def _work(self) -> None:
        try:
            self._tracker.open(self._tracked_run)
        except BaseException as error:
            self._fail("cannot be reached, and gets no metrics", f"{type(error).__name__}: {error}")
            return
        # Trackers end themselves when the process ends; what was registered last is done first.
        atexit.register(self.close)
        while (parcel := self._queue.get()) is not None:
            self._log_step(*parcel)
        try:
            self._tracker.close()
        except Exception as error:
            self._fail("may not have kept all metrics", f"{type(error).__name__}: {error}")

    def _log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._tracker.log(step, metrics)
        except Exception as error:
            self._fail(f"did not take step {step}, and perhaps others", f"{type(error).__name__}: {error}")

    def _fail(self, what: str, evidence: str) -> None:
        if not self._failed:
            self._failed = True
            self._findings.put(
                Finding(
                    code="tracker-failed",
                    severity=Severity.WARNING,
                    what=f"{self._name} {what}; training goes on",
                    where="rank 0",
                    evidence=(evidence[:500],) if evidence else (),
                    remedy=f"See whether {self._name} is installed, and reached from here. A run of holdfast's has the "
                    "metrics in its own log (`holdfast events -o json`). This is said once.",
                )
            )
