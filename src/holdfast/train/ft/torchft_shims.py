"""Owns two parts that TorchFT's manager gets in place of its own: who says whether to commit, and the thread that asks.

Refuses to own the manager, and when it is asked what (replica_group.py).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any


class LocalCommitClient:
    """The client of a replica of one rank, whose word whether to commit is the replica's."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def should_commit(self, _rank: int, _step: int, should_commit: bool, **_: Any) -> bool:
        return should_commit


class DaemonExecutor:
    """One thing after another, in a thread that a process which ends does not wait for, as for an executor's."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        Thread(target=self._work, name="quorum", daemon=True).start()

    def submit(self, work: Callable[..., Any], **named: Any) -> Future[Any]:
        future = Future[Any]()
        self._queue.put((future, partial(work, **named)))
        return future

    def shutdown(self, *, wait: bool = True) -> None:
        """Nothing is left to be ended."""

    def _work(self) -> None:
        while True:
            future, work = self._queue.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
