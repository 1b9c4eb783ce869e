"""Waiting for what nothing reports: a file's content, another process, an object in a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

DEADLINE_S = 240.0
"""What takes longer hangs: a slow machine takes a fraction of it."""

IDLE_SHARE = 3.0
"""Pause between two questions, over the time that an answer took: other tests need the CPUs too."""
LONGEST_PAUSE_S = 1.0

T = TypeVar("T")


def until(reached: Callable[[], T], what: str = "", *, every_s: float = 0.02) -> T:
    """The condition's value, once it is true. One that takes long, such as kubectl, is asked less often."""
    asked = time.monotonic()
    deadline = asked + DEADLINE_S
    while not (value := reached()):
        now = time.monotonic()
        assert now < deadline, what
        time.sleep(max(every_s, min(IDLE_SHARE * (now - asked), LONGEST_PAUSE_S)))
        asked = time.monotonic()
    return value


async def until_async(reached: Callable[[], T], *, every_s: float = 0.01) -> T:
    """The same in an event loop."""
    async with asyncio.timeout(DEADLINE_S):
        while not (value := reached()):  # noqa: ASYNC110 - nothing rings when it is
            await asyncio.sleep(every_s)
    return value
