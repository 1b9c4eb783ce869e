"""Abortable process groups and state transport between replicas, based on TorchFT's.

Unlike TorchFT's, they never make a replica wait for one that is gone. Who takes part, and when: replica_group.py.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, cast

import torch.distributed as dist
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL, create_store_client

from holdfast.train.ft.torchft_private import StateServerTransport, family_of, replace_group
from holdfast.train.torch_private import gloo_group

TIMEOUT = timedelta(minutes=10)
"""Timeout of a step's collectives, for losses that no message reports."""
CONNECT_S = 30.0
"""Seconds that the members of a quorum have to connect; all begin together. It bounds the wait for one that has died,
where no agent reports the loss; a new quorum follows."""


class _AbortableCall:
    """A blocking call in a thread that can be abandoned: neither Gloo nor HTTP can be interrupted."""

    def __init__(self) -> None:
        self._awaited = Future[Any]()

    def run(self, work: Callable[[], Any], timeout_s: float | None = None) -> Any:
        awaited = self._awaited = Future[Any]()
        Thread(target=_resolve, args=(awaited, work), daemon=True).start()
        try:
            return awaited.result(timeout_s)
        finally:
            self._awaited = Future[Any]()  # a group closes when its last reference is dropped

    def abort(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # there is no call to abort
            self._awaited.set_exception(error)


def _resolve(awaited: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except Exception as error:
        with suppress(InvalidStateError):
            awaited.set_exception(error)
    else:
        with suppress(InvalidStateError):  # an abandoned result is dropped, which closes it
            awaited.set_result(result)


class _AbortableGroup:
    """A process group that knows its replicas and can be aborted immediately."""

    members: frozenset[int] = frozenset()
    connecting_since = 0.0
    """Monotonic seconds at which the replicas began to connect."""

    def __init__(self, *, timeout: timedelta) -> None:
        cast("Any", super()).__init__(timeout=timeout)
        self.connecting = _AbortableCall()

    def configure(self, *given: Any, **named: Any) -> None:
        ranks_of_each, ranks = given[6:8]
        self.members, self.connecting_since = frozenset(rank // ranks_of_each for rank in ranks), time.monotonic()
        self.connect(*given, **named)

    def connect(self, *given: Any, **named: Any) -> None:
        cast("Any", super()).configure(*given, **named)

    def abandon(self) -> None:
        """Close the group's connections, so that replicas not adjacent to the lost one detect the loss.

        TorchFT keeps them until the next quorum, so that such a replica waits for the group's timeout. Runs in a
        thread, since Gloo cannot be interrupted: closing it waits for transfers to or from a peer that may hang.
        """
        Thread(target=_abort_group, args=([replace_group(self, None)],), daemon=True).start()


def _abort_group(holder: list[Any]) -> None:
    """Close a group that has no other reference: the thread that drops the last reference waits as well."""
    group = holder.pop()
    if group is not None:
        group.abort()


class AbortableGloo(_AbortableGroup, ProcessGroupGloo):
    """Gloo group for CPUs."""

    def connect(self, *given: Any, **_: Any) -> None:
        """Connect as TorchFT does, but abortable: Gloo waits for a replica that dies meanwhile until its timeout."""
        self.abort(errored=False)
        store, _, rank, world_size = given[:4]

        def connected() -> dist.ProcessGroup:
            # Without torch 2.15's warning about TorchFT's group: it numbers operations, which torch now does itself.
            return gloo_group(create_store_client(store, timeout=TIMEOUT), rank, world_size, TIMEOUT)

        try:
            replace_group(self, self.connecting.run(connected, CONNECT_S))
        except TimeoutError:
            raise ConnectionError(f"not all replicas connected within {CONNECT_S:g} s") from None


class AbortableNccl(_AbortableGroup, ProcessGroupNCCL):
    """NCCL group for GPUs."""


class StateTransport(StateServerTransport):
    """Serves a rank's state to a lagging rank, at an address of this machine that the other can reach."""

    def __init__(self, address: str) -> None:
        super().__init__(address, TIMEOUT)
        self.receiving = _AbortableCall()

    def recv_checkpoint(self, *given: Any, **named: Any) -> Any:
        take: Callable[..., Any] = super().recv_checkpoint
        return self.receiving.run(partial(take, *given, **named))


def make_store(address: str) -> dist.TCPStore:
    """A TCPStore that listens at one address of this machine; by default it would listen at all."""
    with socket.create_server((address, 0), family=family_of(address)) as ear:
        port = ear.getsockname()[1]
        return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=ear.detach())
