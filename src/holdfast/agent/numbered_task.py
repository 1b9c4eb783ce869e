"""A task that the controller orders by number: each number runs once, and its report is sent again when asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Report = TypeVar("Report")


class NumberedTask(Generic[Report]):
    """The task that runs, or the last one."""

    def __init__(self, send: Callable[[Report], object]) -> None:
        self._send = send
        self._number = 0
        self._task: asyncio.Task[Report] | None = None
        self.stopped = asyncio.Event()
        """Set when the task that runs is to end."""

    def request(self, number: int, run: Callable[[], Coroutine[Any, Any, Report]]) -> None:
        """Start a task with a new number; send the report of a known one, now or when it has ended."""
        if not self._start(number, run) and number == self._number:
            self._report_again()

    def stop(self, number: int, end_unstarted: Callable[[], Coroutine[Any, Any, Report]]) -> None:
        """End the task of this number, or never start it, and report that."""
        if not self._start(number, end_unstarted) and number == self._number and not self._report_again():
            self.stopped.set()

    def _start(self, number: int, run: Callable[[], Coroutine[Any, Any, Report]]) -> bool:
        if number <= self._number or not (self._task is None or self._task.done()):
            return False
        self._number = number
        self.stopped.clear()
        self._task = asyncio.ensure_future(run())
        self._task.add_done_callback(self._report)
        return True

    def _report_again(self) -> bool:
        if self._task is None or not self._task.done():
            return False
        self._report(self._task)
        return True

    def _report(self, task: asyncio.Task[Report]) -> None:
        if not task.cancelled():
            self._send(task.result())
