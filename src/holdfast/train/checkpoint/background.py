"""Owns a thread that works behind the loop, which hands it things to do in the least time.

To wake it takes a queue of C's and a lock: a third of what an executor takes to submit, in a loop whose steps have put
other things into the processor's caches (docs/benchmarks.md). Refuses to own what is done.
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
    """Something that was handed over."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._running = threading.Lock()
        self._running.acquire()
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # it is for who asks what came of it
            self._error = error
        del self._call  # and all that it held
        self._running.release()

    def done(self) -> bool:
        return not self._running.locked()

    def result(self) -> T:
        """What came of it, waited for; raises what it raised."""
        with self._running:
            if self._error is not None:
                raise self._error
            return cast("T", self._value)


class BackgroundWorker:
    """A thread that does what it is given, one after the other; the process waits for the last of it when it ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = queue.SimpleQueue[Task[Any] | None]()
        self._started = False

    def submit(self, call: Callable[[], T]) -> Task[T]:
        """Have it done behind the loop."""
        task = Task(call)
        self._queue.put(task)
        if not self._started:
            self._start()
        return task

    def drain(self) -> None:
        """Wait until all that was handed over is done."""
        if self._started:
            self.submit(int).result()

    def _start(self) -> None:
        self._started = True
        # Python waits for threads before it asks anybody to end them; for a daemon it does not.
        threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None).atexit = False
        _STARTED.add(self)
        atexit.unregister(_drain_all)
        atexit.register(_drain_all)  # before what was registered until now


def _work(given: queue.SimpleQueue[Task[Any] | None]) -> None:
    while (task := given.get()) is not None:
        task.run()
        del task  # while it waits for the next


_STARTED: weakref.WeakSet[BackgroundWorker] = weakref.WeakSet()


def _drain_all() -> None:
    for each in list(_STARTED):
        each.drain()
