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
from http.server import ThreadingHTTPServer
from socketserver import BaseRequestHandler, TCPServer
from threading import Thread
from typing import Any, cast

import torch
import torch.distributed as dist
from torchft.checkpointing import HTTPTransport
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL, create_store_client

TIMEOUT = timedelta(minutes=10)
"""Timeout of a step's collectives, for losses that no message reports."""


class _AbortableCall:
    """A blocking call in a thread that can be abandoned: neither Gloo nor HTTP can be interrupted."""

    def __init__(self) -> None:
        self._awaited = Future[Any]()

    def run(self, work: Callable[[], Any]) -> Any:
        awaited = self._awaited = Future[Any]()
        Thread(target=_resolve, args=(awaited, work), daemon=True).start()
        try:
            return awaited.result()
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
    _pg: Any

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
        holder, self._pg = [self._pg], None
        Thread(target=_abort_group, args=(holder,), daemon=True).start()


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
            return self._create_pg(create_store_client(store, timeout=TIMEOUT), rank, world_size)

        self._pg = self.connecting.run(connected)

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        """Create it without torch 2.15's warning: TorchFT numbers operations, which torch now does itself."""
        group, cpu = dist.ProcessGroup(store, rank, world_size), torch.device("cpu")
        gloo = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        for device in (cpu, torch.device("cuda")) if torch.cuda.is_available() else (cpu,):
            group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, gloo)
        return group


class AbortableNccl(_AbortableGroup, ProcessGroupNCCL):
    """NCCL group for GPUs."""


class StateTransport(HTTPTransport[Any]):
    """Serves a rank's state to a lagging rank, at an address of this machine that the other can reach."""

    def __init__(self, address: str) -> None:
        super().__init__(timeout=TIMEOUT, num_chunks=0)
        wide = cast("Any", self)._server
        # Python's server would log a line per transfer into the rank's log.
        wide.RequestHandlerClass.log_message = _silent
        self._server = _StateServer(address, wide.RequestHandlerClass)
        wide.server_close()
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.receiving = _AbortableCall()

    def _serve(self) -> None:
        """Disables TorchFT's own server, which would listen on every address of this machine."""

    def recv_checkpoint(self, *given: Any, **named: Any) -> Any:
        take: Callable[..., Any] = super().recv_checkpoint
        return self.receiving.run(partial(take, *given, **named))

    def address(self) -> str:
        """An IP address: TorchFT uses the machine's name, which other Kubernetes pods cannot resolve."""
        host, port = cast("Any", self)._server.socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/checkpoint/"


class _StateServer(ThreadingHTTPServer):
    """Serves at one address, IPv4 or IPv6."""

    request_queue_size = 1024

    def __init__(self, address: str, handler: type[BaseRequestHandler]) -> None:
        self.address_family = _family(address)
        super().__init__((address, 0), handler)

    def server_bind(self) -> None:
        """Binds as TCPServer does: HTTPServer looks up this machine's name in DNS, and may block."""
        TCPServer.server_bind(self)


def make_store(address: str) -> dist.TCPStore:
    """A TCPStore that listens at one address of this machine; by default it would listen at all."""
    with socket.create_server((address, 0), family=_family(address)) as ear:
        port = ear.getsockname()[1]
        return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=ear.detach())


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _silent(*_: object) -> None:
    pass
