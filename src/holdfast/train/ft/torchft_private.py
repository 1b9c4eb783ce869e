"""The private parts of TorchFT that holdfast uses or replaces, each behind a name of our own.

tests/train/test_torchft_private.py checks each part, and says what an upgrade of TorchFT breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager

# Manager


def adjust_manager(manager: Manager, *, only_rank: bool, donor_timeout: timedelta) -> None:
    """Replace what a manager keeps from its start, where it connects with another timeout."""
    wide = cast("Any", manager)
    if only_rank:
        wide._client = _LocalCommitClient(wide._client)
    wide._executor = _DaemonExecutor()
    wide._connect_timeout = donor_timeout


def quorum_id(manager: Manager) -> int:
    """The number of the last quorum."""
    return cast("Any", manager)._quorum_id


def quorum_future(manager: Manager) -> Future[None]:
    """Done when the requested quorum is there, and this replica is connected and has its state."""
    return cast("Future[None]", cast("Any", manager)._quorum_future)


def is_behind(manager: Manager) -> bool:
    """Whether this replica is behind the others of the last quorum, and so has to receive their state."""
    return cast("Any", manager)._healing


class _LocalCommitClient:
    """Commit client of a replica with one rank, which decides alone whether to commit."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def should_commit(self, _rank: int, _step: int, should_commit: bool, **_: Any) -> bool:
        return should_commit


class _DaemonExecutor:
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


# Process groups


def replace_group(wrapper: Any, group: Any) -> Any:
    """Set torch's group inside one of TorchFT's; returns the previous one."""
    previous, wrapper._pg = wrapper._pg, group
    return previous


def current_group(wrapper: Any) -> Any:
    """Torch's group inside one of TorchFT's; None if there is none."""
    return wrapper._pg


# Periodic synchronisation


def diloco_fragment(manager: Manager, model: nn.Module, inner: Optimizer, outer: Optimizer, every: int) -> Any:
    """DiLoCo's synchronisation of a whole model, without its hooks on the inner optimizer."""
    (fragment,) = DiLoCo(manager, [model], inner, outer, every)._fragments
    return fragment


def local_sgd_sync(manager: Manager, model: nn.Module, optimizer: Optimizer, every: int) -> Callable[[], None]:
    """LocalSGD's synchronisation, without its hooks on the optimizer."""
    return LocalSGD(manager, model, optimizer, every)._perform_sync
