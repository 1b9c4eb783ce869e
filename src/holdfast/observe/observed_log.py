"""Reads what is new in an event log, in parts between which others get the thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.events import AnyEvent
from holdfast.events.log import EventReader

MAX_EVENTS_AT_ONCE = 500
"""Events between two pauses, about 20 ms."""


class ObservedLog:
    """One event log, and what is told of each event."""

    def __init__(self, events: EventReader, add: Callable[[AnyEvent], object]) -> None:
        self._events = events
        self._add = add
        self._reading = asyncio.Lock()

    async def read(self) -> None:
        """Read what is new; raises `UnsupportedFormat`, and OSError if the log cannot be read."""
        async with self._reading:
            for number, event in enumerate(self._events.read(), start=1):
                self._add(event)
                if number % MAX_EVENTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
