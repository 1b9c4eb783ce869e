"""Runs calls that can be abandoned."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from holdfast.host.daemon_threads import resolve_in_daemon_thread


class AbortableCall:
    """A blocking call in a thread that can be abandoned: neither Gloo, NCCL nor HTTP can be interrupted."""

    def __init__(self) -> None:
        self._awaited = Future[Any]()

    def run(self, work: Callable[[], Any], timeout_s: float | None = None) -> Any:
        awaited = self._awaited = Future[Any]()  # before the thread starts, so that no abort is missed
        resolve_in_daemon_thread(awaited, work)
        try:
            return awaited.result(timeout_s)
        finally:
            self._awaited = Future[Any]()  # a group closes when its last reference is dropped

    def abort(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # there is no call to abort
            self._awaited.set_exception(error)
