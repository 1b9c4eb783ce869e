"""A reserved port is free for no other process until its rank listens on it."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from holdfast.agent.rendezvous_port import ReservedPort, port_conflict

ADDRESS = "127.0.0.1"


def test_server_can_listen_on_a_reserved_port_and_is_reached() -> None:
    held = ReservedPort(ADDRESS)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        writer.close()

    async def meet() -> bytes:
        async with await asyncio.start_server(answer, ADDRESS, held.number):
            reader, writer = await asyncio.open_connection(ADDRESS, held.number)
            said = await reader.read()
            writer.close()
            return said

    assert asyncio.run(meet()) == b"here"


def test_server_can_listen_on_every_address_of_a_reserved_port() -> None:
    held = ReservedPort(ADDRESS)
    with socket.create_server(("", held.number)) as server:
        assert server.getsockname()[1] == held.number


def test_reserved_port_refuses_connections_immediately() -> None:
    held = ReservedPort(ADDRESS)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ADDRESS, held.number))


def test_reserved_ports_are_never_the_same() -> None:
    held = [ReservedPort(ADDRESS) for _ in range(500)]
    assert len({port.number for port in held}) == 500


def test_reserved_port_is_never_given_as_an_ephemeral_port() -> None:
    kept = [ReservedPort(ADDRESS) for _ in range(200)]
    drawn: list[socket.socket] = []
    for reuse in (0, 1):
        for _ in range(300):
            other = socket.socket()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            other.bind((ADDRESS, 0))
            drawn.append(other)
    assert not {port.number for port in kept} & {other.getsockname()[1] for other in drawn}
    for other in drawn:
        other.close()


def test_renewed_port_differs_from_the_last() -> None:
    held = ReservedPort(ADDRESS)
    for _ in range(200):
        before = held.number
        held.renew()
        assert held.number != before


PYTHONS = "OSError: [Errno 98] Address already in use"
TORCHS = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: {port}, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


@pytest.mark.parametrize("error", [PYTHONS, TORCHS])
def test_stranger_that_has_the_port_is_named(error: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        assert port_conflict(error.format(port=port), port).startswith(
            f"port {port} is taken by process {os.getpid()} ("
        )


def test_error_about_another_port_or_about_none_is_no_strangers_doing() -> None:
    held = ReservedPort("127.0.0.1")  # bound by ourselves, where nobody listens
    assert port_conflict(PYTHONS, held.number) == ""
    assert port_conflict("ValueError: bad batch", held.number) == ""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        assert port_conflict(TORCHS.format(port=1), stranger.getsockname()[1]) == ""


def test_stranger_that_has_let_go_by_now_is_believed_where_the_error_names_the_port() -> None:
    held = ReservedPort("127.0.0.1")
    assert "was taken" in port_conflict(TORCHS.format(port=held.number), held.number)
