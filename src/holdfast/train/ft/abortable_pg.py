"""Owns what a replica holds of the others: the group in which it reaches them, and the way a state goes between them.

Both are TorchFT's, and differ from it in that no replica waits in them for one that is gone. Refuses to own who takes
part, and when (replica_group.py).
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
"""Longest that a rank waits for others in a step, where nobody tells it that they are gone."""


class _AbortableCall:
    """What is waited for in a thread, which is left alone where it is given up: neither Gloo nor HTTP can be told."""

    def __init__(self) -> None:
        self._awaited = Future[Any]()

    def run(self, work: Callable[[], Any]) -> Any:
        awaited = self._awaited = Future[Any]()
        Thread(target=_resolve, args=(awaited, work), daemon=True).start()
        try:
            return awaited.result()
        finally:
            self._awaited = Future[Any]()  # a group is closed by nobody's holding it any more

    def abort(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # there is nothing to be given up
            self._awaited.set_exception(error)


def _resolve(awaited: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except Exception as error:
        with suppress(InvalidStateError):
            awaited.set_exception(error)
    else:
        with suppress(InvalidStateError):  # what nobody waits for is closed with it
            awaited.set_result(result)


class _AbortableGroup:
    """A process group that knows which replicas are in it, and can be left at once."""

    members: frozenset[int] = frozenset()
    connecting_since = 0.0
    """Monotonic seconds at which they began to connect."""
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
        """Close its connections: a replica that is no neighbour of the lost one learns of it so.

        TorchFT keeps them until the next quorum, and such a replica waits out the group's timeout. In a thread, since
        Gloo cannot be stopped: its end waits for what still travels, to or from a peer that may hang.
        """
        held, self._pg = [self._pg], None
        Thread(target=_abort_group, args=(held,), daemon=True).start()


def _abort_group(held: list[Any]) -> None:
    """Close a group, which nobody else holds any more: whoever lets go of it last waits as well."""
    group = held.pop()
    if group is not None:
        group.abort()


class AbortableGloo(_AbortableGroup, ProcessGroupGloo):
    """That of CPUs."""

    def connect(self, *given: Any, **_: Any) -> None:
        """As TorchFT does it, but for a replica that dies meanwhile, for which Gloo waits as long as for anything."""
        self.abort(errored=False)
        store, _, rank, world_size = given[:4]

        def connected() -> dist.ProcessGroup:
            return self._create_pg(create_store_client(store, timeout=TIMEOUT), rank, world_size)

        self._pg = self.connecting.run(connected)

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        """Make it without what torch 2.15 warns of: TorchFT numbers what is sent, which torch does now."""
        group, cpu = dist.ProcessGroup(store, rank, world_size), torch.device("cpu")
        gloo = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        for device in (cpu, torch.device("cuda")) if torch.cuda.is_available() else (cpu,):
            group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, gloo)
        return group


class AbortableNccl(_AbortableGroup, ProcessGroupNCCL):
    """That of GPUs."""


class StateTransport(HTTPTransport[Any]):
    """Gives a rank's state to one that catches up, at an address of this machine that the other can reach."""

    def __init__(self, address: str) -> None:
        super().__init__(timeout=TIMEOUT, num_chunks=0)
        wide = cast("Any", self)._server
        # Python's server would write a line for each that catches up into the rank's log.
        wide.RequestHandlerClass.log_message = _silent
        self._server = _StateServer(address, wide.RequestHandlerClass)
        wide.server_close()
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.receiving = _AbortableCall()

    def _serve(self) -> None:
        """Nothing at the server that TorchFT has made, which would listen on every address of this machine."""

    def recv_checkpoint(self, *given: Any, **named: Any) -> Any:
        take: Callable[..., Any] = super().recv_checkpoint
        return self.receiving.run(partial(take, *given, **named))

    def address(self) -> str:
        """TorchFT's own has the machine's name in it, which nobody else knows in a Kubernetes pod."""
        host, port = cast("Any", self)._server.socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/checkpoint/"


class _StateServer(ThreadingHTTPServer):
    """Serves at one address, of either family."""

    request_queue_size = 1024

    def __init__(self, address: str, handler: type[BaseRequestHandler]) -> None:
        self.address_family = _family(address)
        super().__init__((address, 0), handler)

    def server_bind(self) -> None:
        """As TCPServer does it: HTTPServer asks a name server for this machine's name, and may wait for it."""
        TCPServer.server_bind(self)


def make_store(address: str) -> dist.TCPStore:
    """A store that listens at one address of this machine; by itself it would at every one."""
    with socket.create_server((address, 0), family=_family(address)) as ear:
        port = ear.getsockname()[1]
        return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=ear.detach())


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _silent(*_: object) -> None:
    pass
