"""Lets the ranks of a node reach the run's quorum service through the controller's port, with the agent's token.

The service speaks gRPC without authentication, so where others share the network it listens on the controller's machine
only. Ranks connect to a port of this node's loopback; each connection continues in a WebSocket to the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from holdfast.agent.controller_connection import open_socket, tls_options
from holdfast.protocol import routes
from holdfast.protocol.orders import StartRanks

log = logging.getLogger("holdfast.agent")

LOOPBACK = "127.0.0.1"
CHUNK_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 1 << 20
VARIABLE = "TORCHFT_LIGHTHOUSE"


class QuorumRelay:
    """Listens on this node's loopback from the first start that needs it."""

    def __init__(self, url: Callable[[], str], token: str, ca: Path | None) -> None:
        self._url, self._token, self._tls = url, token, tls_options(ca)
        self._listening: socket.socket | None = None
        self._serving: asyncio.Task[asyncio.Server] | None = None

    def with_address(self, order: StartRanks) -> StartRanks:
        """The order, with this relay as the service's address if ranks are to use it."""
        if not order.relays_quorum:
            return order
        if self._listening is None:
            self._listening = socket.create_server((LOOPBACK, 0))
            self._serving = asyncio.ensure_future(asyncio.start_server(self._relay, sock=self._listening))
        address = {VARIABLE: f"http://{LOOPBACK}:{self._listening.getsockname()[1]}"}
        ranks = tuple(msgspec.structs.replace(rank, env=rank.env | address) for rank in order.ranks)
        return msgspec.structs.replace(order, ranks=ranks)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until either end closes it."""
        url = urlsplit(self._url())._replace(path=routes.QUORUM).geturl()
        options: dict[str, Any] = {"compression": None, "proxy": None, "max_size": MAX_MESSAGE_BYTES, **self._tls}
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            async with connect(url, sock=await open_socket(url), additional_headers=headers, **options) as controller:
                sending = asyncio.ensure_future(_send(reader, controller))
                try:
                    async for data in controller:
                        writer.write(data if isinstance(data, bytes) else data.encode())
                        await writer.drain()
                finally:
                    sending.cancel()
        except (OSError, WebSocketException, TimeoutError) as error:
            log.warning("the quorum service is out of reach: %s", error)  # the rank connects again
        finally:
            writer.close()


async def _send(reader: asyncio.StreamReader, controller: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed, OSError):
        while data := await reader.read(CHUNK_BYTES):
            await controller.send(data)
        await controller.close()
