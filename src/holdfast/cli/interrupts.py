"""Owns Ctrl-C while a run is shown: it is counted, and what it means is the business of whoever shows the run."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self


class InterruptCounter:
    """Counts Ctrl-C instead of being ended by it."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
