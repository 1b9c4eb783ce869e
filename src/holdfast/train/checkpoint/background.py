"""Single background worker thread whose `submit` costs the loop as little time as possible.

A wake-up takes a queue implemented in C and a lock: a third of the time of an executor's submit, in a loop whose steps
have evicted it from the processor's caches (bench/results/HISTORY.md).
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Task(Generic[T]):
    """A submitted call."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._running = threading.Lock()
        self._running.acquire()
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # `result` raises it
            self._error = error
        del self._call  # and everything it references
        self._running.release()

    def done(self) -> bool:
        return not self._running.locked()

    def result(self) -> T:
        """Wait for the result of the call; raises its exception."""
        with self._running:
            if self._error is not None:
                raise self._error
            return cast("T", self._value)


class BackgroundWorker:
    """A thread that runs submitted calls in order; at exit the process waits for the last one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = queue.SimpleQueue[Task[Any] | None]()
        self._started = False

    def submit(self, call: Callable[[], T]) -> Task[T]:
        """Run the call in the background."""
        task = Task(call)
        self._queue.put(task)
        if not self._started:
            self._start()
        return task

    def drain(self) -> None:
        """Wait until all submitted calls are done."""
        if self._started:
            self.submit(int).result()

    def _start(self) -> None:
        self._started = True
        # Python waits for non-daemon threads before it runs exit handlers; for daemons it does not.
        threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None).atexit = False
        _STARTED.add(self)
        atexit.unregister(_drain_all)
        atexit.register(_drain_all)  # runs before handlers registered earlier


def _work(given: queue.SimpleQueue[Task[Any] | None]) -> None:
    while (task := given.get()) is not None:
        task.run()
        del task  # frees it while waiting for the next


_STARTED: weakref.WeakSet[BackgroundWorker] = weakref.WeakSet()


def _drain_all() -> None:
    for each in list(_STARTED):
        each.drain()
