"""Owns the way between the machine's loopback and the kubelet, which may live where there is no such thing.

Without root the kubelet is in a network namespace from which no TCP port of the machine is reached; Unix sockets are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

_CHUNK_BYTES = 65536
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[_Streams]]


def to_unix(path: Path) -> Connect:
    """Connects to a Unix socket."""
    return lambda: asyncio.open_unix_connection(path)


def to_port(host: str, port: int) -> Connect:
    """Connects to a TCP port."""
    return lambda: asyncio.open_connection(host, port)


def forward(connect: Connect) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """What a server does with each connection: it becomes one with what `connect` leads to."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await connect()
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))

    return carry


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
            return
    writer.close()
