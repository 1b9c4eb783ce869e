"""Reads the sources of some monitors when they are due, or when the kernel has something new; one thread."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from holdfast.watch.monitor import AnyMonitor, Judge, Source, SourceMissing, Symptom

log = logging.getLogger("holdfast.agent")

MIN_REST_S = 0.25
"""Shortest time between two readings of a source, however often it has something new: kernels can log in floods."""
MAX_FAILURES = 5
"""Readings in a row that may fail; then the source is not read any more."""

Overlay = Callable[[Any, float], Any]
"""What a drill makes of a reading at a time; of None where the source is missing."""


class _Row(Struct, kw_only=True):
    monitor: AnyMonitor
    source: Source[Any] | None
    judge: Judge[Any]
    due_s: float = 0.0
    read_s: float = -1e9
    reading: Any = None
    """The latest; None if it was not read yet."""
    failures: int = 0
    overlay: Overlay | None = None
    overlay_ends_s: float = 0.0


class Latest(Struct, frozen=True, kw_only=True):
    """The latest reading of a source."""

    age_s: float
    reading: Any


class Opened(Struct, frozen=True, kw_only=True):
    """Which sources a node has."""

    present: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why each other source is not read."""


class MonitorLoop:
    """The monitors of one thread."""

    def __init__(
        self,
        monitors: Sequence[AnyMonitor],
        report: Callable[[str, Symptom], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monitors = monitors
        self._report = report
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._lock = threading.Lock()
        """Guards the rows' overlays, which another thread sets."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopped = False

    def start(self, opened: Callable[[Opened], None]) -> None:
        """Read in a daemon thread until `stop`; `opened` is called there once all sources are known."""
        threading.Thread(target=self._run, args=(opened,), name="monitors", daemon=True).start()

    def open(self) -> Opened:
        """Open every source; one that is missing is not tried again."""
        present, missing = list[str](), dict[str, str]()
        for monitor in self._monitors:
            try:
                source = monitor.open()
            except SourceMissing as error:
                source, missing[monitor.source] = None, str(error)
            else:
                present.append(monitor.source)
            self._rows[monitor.source] = _Row(monitor=monitor, source=source, judge=monitor.judge(source))
        return Opened(present=tuple(present), missing=missing)

    def overlay(self, source: str, overlay: Overlay, for_s: float) -> None:
        """Pass the readings of a source through a function for so many seconds, from another thread."""
        with self._lock:
            row = self._rows.get(source)
            if row is not None:
                row.overlay, row.overlay_ends_s, row.due_s = overlay, self._clock() + for_s, 0.0
        self._notify()

    def latest(self) -> dict[str, Latest]:
        """The latest reading of each source, for another thread."""
        now = self._clock()
        return {
            name: Latest(age_s=now - row.read_s, reading=row.reading)
            for name, row in dict(self._rows).items()
            if row.reading is not None
        }

    def stop(self) -> None:
        """End the thread, from another thread."""
        self._stopped = True
        self._notify()

    def step(self, ready: Sequence[int] = ()) -> float:
        """Read what is due, and what is ready by its descriptor; return the seconds until something is due."""
        now = self._clock()
        rows = [row for row in self._rows.values() if self._is_active(row, now)]
        for row in rows:
            is_ready = row.source is not None and row.source.descriptor() in ready
            if now >= row.due_s or (is_ready and now >= row.read_s + MIN_REST_S):
                self._read(row, now)
        due = [row.due_s for row in rows if self._is_active(row, now)]
        return max(0.0, min(due, default=now + 3600.0) - self._clock())

    def _is_active(self, row: _Row, now: float) -> bool:
        with self._lock:
            if row.overlay is not None and now >= row.overlay_ends_s:
                row.overlay = None
            return row.source is not None or row.overlay is not None

    def _read(self, row: _Row, now: float) -> None:
        row.due_s, row.read_s = now + row.monitor.period_s, now
        with self._lock:
            overlay = row.overlay
        try:
            reading = row.source.read(now) if row.source is not None else None
            if overlay is not None:
                reading = overlay(reading, now)
            row.reading = reading
            for symptom in row.judge(reading, now):
                self._report(row.monitor.source, symptom)
            row.failures = 0
        except Exception:  # an observer that fails must not stop the others
            row.failures += 1
            if row.failures == MAX_FAILURES:
                log.warning("%s cannot be read any more", row.monitor.source, exc_info=True)
                if row.source is not None:
                    row.source.close()
                row.source = None

    def _run(self, opened: Callable[[Opened], None]) -> None:
        opened(self.open())
        ready: list[int] = []
        while not self._stopped:
            ready = self._wait(self.step(ready))
        for row in self._rows.values():
            if row.source is not None:
                row.source.close()  # but not the eventfd: another thread may still write to it

    def _wait(self, seconds: float) -> list[int]:
        """Wait so long, or until a source has something new; returns the descriptors of those."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for row in self._rows.values():
            descriptor = None if row.source is None else row.source.descriptor()
            if descriptor is not None:
                rest_s = row.read_s + MIN_REST_S - self._clock()
                if rest_s > 0:
                    seconds = min(seconds, rest_s)
                else:
                    poll.register(descriptor, select.POLLIN)
        found = [descriptor for descriptor, _ in poll.poll(seconds * 1000 + 1)]
        if self._wake in found:
            os.eventfd_read(self._wake)
        return found

    def _notify(self) -> None:
        os.eventfd_write(self._wake, 1)
