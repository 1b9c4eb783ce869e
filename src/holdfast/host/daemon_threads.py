"""Runs what may block for ever, such as a read that a driver does not answer, where it delays no exit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(read: Callable[[], T]) -> Future[T]:
    """Call `read` in a daemon thread of its own: the interpreter does not wait for it."""
    future = Future[T]()

    def run() -> None:
        try:
            result = read()
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(result)

    Thread(target=run, daemon=True).start()
    return future
