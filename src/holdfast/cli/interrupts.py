"""Counts Ctrl-C while a command follows a run; the caller decides what each one does."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self


class InterruptCounter:
    """Replaces the SIGINT handler: counts signals instead of ending the process."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
