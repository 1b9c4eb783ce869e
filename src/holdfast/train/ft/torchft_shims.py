"""Replaces two parts of TorchFT's manager: its commit client and its executor (replica_group.py)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any


class LocalCommitClient:
    """Commit client of a replica with one rank, which decides alone whether to commit."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def should_commit(self, _rank: int, _step: int, should_commit: bool, **_: Any) -> bool:
        return should_commit


class DaemonExecutor:
    """Runs calls in order in a daemon thread, which does not delay process exit as an executor's would."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        Thread(target=self._work, name="quorum", daemon=True).start()

    def submit(self, work: Callable[..., Any], **named: Any) -> Future[Any]:
        future = Future[Any]()
        self._queue.put((future, partial(work, **named)))
        return future

    def shutdown(self, *, wait: bool = True) -> None:
        """Does nothing: a daemon thread needs no shutdown."""

    def _work(self) -> None:
        while True:
            future, work = self._queue.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
