"""A held port is nobody else's until the rank it is for listens on it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from holdfast.agent.port import HeldPort

ADDRESS = "127.0.0.1"


def test_server_can_listen_on_a_held_port_and_is_reached() -> None:
    held = HeldPort(ADDRESS)

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


def test_server_can_listen_on_every_address_of_a_held_port() -> None:
    held = HeldPort(ADDRESS)
    with socket.create_server(("", held.number)) as server:
        assert server.getsockname()[1] == held.number


def test_held_port_refuses_connections_rather_than_keeping_them_waiting() -> None:
    held = HeldPort(ADDRESS)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ADDRESS, held.number))


def test_ports_held_together_are_never_the_same() -> None:
    held = [HeldPort(ADDRESS) for _ in range(500)]
    assert len({port.number for port in held}) == 500


def test_held_port_is_drawn_by_nobody_who_asks_for_any() -> None:
    kept = [HeldPort(ADDRESS) for _ in range(200)]
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
    held = HeldPort(ADDRESS)
    for _ in range(200):
        before = held.number
        held.renew()
        assert held.number != before
