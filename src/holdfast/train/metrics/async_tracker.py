"""Queue and thread in front of an experiment tracker, so that a slow or broken tracker never stops training.

The loop only enqueues a step. A tracker's failure is recorded once, for the loop to report, since only the loop's
thread talks to the agent. Trackers: trackers.py.
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
"""Maximum steps queued for a tracker; about 20 MB."""
CLOSE_S = 20.0
"""Maximum seconds that an exiting process waits for a tracker to take the rest."""

_QueuedStep = tuple[int, Mapping[str, float]]


class AsyncTracker:
    """Delivers steps to one tracker, in order."""

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
        """Enqueue a step; drops it if the queue is full."""
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            self._fail(f"is {BACKLOG_STEPS:,} steps behind, and misses those that follow", "")

    def take_finding(self) -> Finding | None:
        """Finding about the tracker, returned once."""
        return None if self._findings.empty() else self._findings.get()

    def close(self) -> None:
        """Deliver the rest, for at most `CLOSE_S`; idempotent."""
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
        # Trackers register their own exit handlers; the handler registered last runs first.
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
                    what=f"{self._name} {what}; training continues",
                    where="rank 0",
                    evidence=(evidence[:500],) if evidence else (),
                    remedy=f"See whether {self._name} is installed, and reached from here. A run of holdfast's has the "
                    "metrics in its own log (`holdfast events -o json`). This is reported once.",
                )
            )
