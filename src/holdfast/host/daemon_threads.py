"""Runs what may block for ever, such as a read that a driver does not answer, where it delays no exit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(read: Callable[[], T]) -> Future[T]:
    """Call `read` in its own daemon thread: the interpreter does not wait for it.

    A result that comes after the future was cancelled or resolved is dropped.
    """
    future = Future[T]()
    resolve_in_daemon_thread(future, read)
    return future


def resolve_in_daemon_thread(future: Future[T], read: Callable[[], T]) -> None:
    """The same for a future that others know before the thread starts."""

    def run() -> None:
        try:
            result = read()
        except Exception as error:
            with suppress(InvalidStateError):
                future.set_exception(error)
        else:
            with suppress(InvalidStateError):
                future.set_result(result)

    Thread(target=run, daemon=True).start()
