"""Connections between replicas: no replica waits for one that is gone, or accepts unneeded connections."""

from __future__ import annotations

import socket
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
import torch
from torch.distributed import TCPStore

from holdfast.train.ft.abortable_pg import AbortableGloo, make_store
from holdfast.train.ft.state_transport import StateTransport

DEADLINE_S = 30.0
TIMEOUT = timedelta(minutes=10)


@pytest.mark.parametrize("who", ["member", "store"])
def test_group_whose_member_or_store_never_comes_is_given_up(who: str) -> None:
    with socket.socket() as ear, ThreadPoolExecutor(1) as pool:
        ear.bind(("127.0.0.1", 0))
        port = ear.getsockname()[1]
        store = listen(ear, port) if who == "member" else None
        group = AbortableGloo(TIMEOUT)
        joining = pool.submit(group.configure, f"127.0.0.1:{port}/quorum", "0", 0, 2, 1, 0, 1, [0, 1])
        deadline = time.monotonic() + DEADLINE_S
        while not joining.done() and time.monotonic() < deadline:
            group.connecting.abort(ConnectionError("lost: replica 1"))
        with pytest.raises(ConnectionError, match="lost: replica 1"):
            joining.result(0)
        store = store or listen(ear, port)  # else the thread that was left would try to reach it for ten minutes
    assert group.members == {0, 1}


def listen(ear: socket.socket, port: int) -> TCPStore:
    """A store at a port that a socket has."""
    ear.listen()
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=ear.detach())


def test_group_of_one_connects() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = AbortableGloo(TIMEOUT)
    group.configure(f"localhost:{store.port}/quorum", "0", 0, 1, 1, 0, 1, [0])
    assert group.size() == 1


def test_group_that_is_left_is_held_by_nobody_so_that_its_connections_close() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = AbortableGloo(TIMEOUT)
    group.configure(f"localhost:{store.port}/quorum", "0", 0, 1, 1, 0, 1, [0])
    held = weakref.ref(group.parent)
    group.close(ConnectionError("left"))
    deadline = time.monotonic() + DEADLINE_S
    while held() is not None:
        assert time.monotonic() < deadline


class ClosedMeanwhile(AbortableGloo):
    """Another thread closes it just before an operation begins."""

    def _start(self, group, tensor, wake):
        self.close(ConnectionError("lost: replica 1"))
        self._closing.join()
        return super()._start(group, tensor, wake)


def test_operation_that_begins_as_its_group_is_closed_is_not_waited_for() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    groups = [ClosedMeanwhile(timedelta(seconds=20)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for each in [
            pool.submit(group.configure, f"localhost:{store.port}/quorum", "0", rank, 2, 1, 0, 1, [0, 1])
            for rank, group in enumerate(groups)
        ]:
            each.result(DEADLINE_S)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="lost: replica 1"):
        groups[0].start_allreduce(torch.ones(1), lambda _: None)
    assert time.monotonic() - began < 10


class HeldByAbort:
    """An operation of which nothing can be learned: an abort holds the mutex of its communicator."""

    def done(self) -> bool:
        raise AssertionError("it would wait for the end of the abort")


def test_operation_of_a_closed_group_is_not_asked_whether_it_is_done() -> None:
    group = AbortableGloo(TIMEOUT)
    group._operations.append(HeldByAbort())
    group.close(ConnectionError("lost: replica 1"))
    with pytest.raises(ConnectionError, match="lost: replica 1"):
        group.is_waiting()


@pytest.mark.parametrize("what", ["state", "store"])
def test_others_are_listened_to_at_one_address(what: str) -> None:
    store, transport = make_store("127.0.0.1"), StateTransport("127.0.0.1", TIMEOUT, lambda: 1)
    port = store.port if what == "store" else urlsplit(transport.metadata()).port
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_store_and_state_are_had_at_an_address_of_either_family(address: str) -> None:
    store, transport = make_store(address), StateTransport(address, TIMEOUT, lambda: 1)
    TCPStore(address, store.port).set("step", "5")
    donor = transport.metadata()
    transport.send_checkpoint([1], 5, {"weight": 3}, TIMEOUT)
    assert store.get("step") == b"5"
    assert StateTransport(address, TIMEOUT, lambda: 1).recv_checkpoint(0, donor, 5, TIMEOUT) == {"weight": 3}
