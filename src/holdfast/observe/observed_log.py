"""What is exported of a run, kept up to date from its event log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.events.log import EventReader
from holdfast.observe.run_observation import RunObservation, observe_event

MAX_EVENTS_AT_ONCE = 500
"""Events between two pauses, about 20 ms."""


class ObservedLog:
    """One run's event log and what is exported of it."""

    def __init__(self, log: Path) -> None:
        self._events = EventReader(log)
        self.known = RunObservation()

    def read(self) -> Iterator[None]:
        """Read what is new in the log; yields every `MAX_EVENTS_AT_ONCE` events."""
        for number, event in enumerate(self._events.read(), start=1):
            self.known = observe_event(self.known, event)
            if number % MAX_EVENTS_AT_ONCE == 0:
                yield
