"""Measures how long checkpoints stall the training.

On a GPU it is the time that the device is idle: a loop that waits while the device still has work costs nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

from holdfast.train.accelerator import Accelerator, Mark


class StallClock:
    """Adds up the stalls of one kind; used by the loop's thread alone."""

    def __init__(self, accelerator: Accelerator | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without an accelerator, `clock` measures the loop's thread."""
        self._accelerator = accelerator
        self._clock = clock
        self._stalled_s = 0.0
        self._unknown = deque[tuple[Mark, Mark]]()
        """Begin and end of stalls that the device may not have reached."""

    @contextmanager
    def waiting(self) -> Generator[None]:
        """The body may wait for a checkpoint, or have the device wait."""
        if self._accelerator is None:
            began = self._clock()
            try:
                yield
            finally:
                self._stalled_s += self._clock() - began
            return
        began_at = self._accelerator.mark()
        try:
            yield
        finally:
            self._unknown.append((began_at, self._accelerator.mark()))

    def take_s(self) -> float:
        """Seconds of the stalls that are over since the last call; on a device others are returned later."""
        while self._unknown and self._unknown[0][1].reached():
            began_at, ended_at = self._unknown.popleft()
            self._stalled_s += began_at.seconds_until(ended_at)
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        return stalled_s

    @property
    def settled(self) -> bool:
        """Whether no stall is left to be returned."""
        return not self._unknown and not self._stalled_s
