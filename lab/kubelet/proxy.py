"""Proxy between the machine's loopback and the kubelet, which may be in another network namespace.

Without root the kubelet runs in a network namespace that cannot reach the machine's TCP ports; Unix sockets work.
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
    """Connect to a Unix socket."""
    return lambda: asyncio.open_unix_connection(path)


def to_port(host: str, port: int) -> Connect:
    """Connect to a TCP port."""
    return lambda: asyncio.open_connection(host, port)


def forward(connect: Connect) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A connection handler that forwards to what `connect` opens."""

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
