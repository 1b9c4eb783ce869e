"""A connection to a controller through the cluster's Gateway, which routes it by the server name of the handshake."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from holdfast.launch.kubernetes.client.api_errors import GatewayUnreachable

if TYPE_CHECKING:
    from holdfast.job.targets import ControllerGateway

CONNECT_TIMEOUT_S = 30.0
"""Longest time to wait for a connection."""
_CHUNK_BYTES = 64 * 1024


class GatewayRoute(msgspec.Struct, frozen=True, kw_only=True):
    """The way to a run's controller through a Gateway."""

    host: str
    """The name that the run's TLSRoute matches."""
    port: int
    address: str
    """Where to connect."""

    @classmethod
    def of(cls, gateway: ControllerGateway | None, run: str) -> GatewayRoute | None:
        """The way to a run's controller, if its target names a Gateway."""
        if gateway is None:
            return None
        host = f"{run}.{gateway.host}"
        return cls(host=host, port=gateway.port, address=gateway.address or host)

    @property
    def shown(self) -> str:
        """The way, for messages."""
        through = "" if self.address == self.host else f" (at {self.address})"
        return f"{self.host}:{self.port}{through}"


class GatewayPort:
    """One connection to a Gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, route: GatewayRoute) -> None:
        self._reader, self._writer, self._route = reader, writer, route

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise _unreachable(self._route, error) from error

    async def receive(self) -> bytes:
        """The next bytes; raises GatewayUnreachable if the connection has ended."""
        try:
            data = await self._reader.read(_CHUNK_BYTES)
        except OSError as error:
            raise _unreachable(self._route, error) from error
        if not data:
            raise _unreachable(self._route, ConnectionError("it closed the connection"))
        return data


@asynccontextmanager
async def connect_to_gateway(route: GatewayRoute) -> AsyncGenerator[GatewayPort]:
    """Connect to a Gateway; raises GatewayUnreachable."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(route.address, route.port)
    except OSError as error:
        raise _unreachable(route, error) from error
    try:
        yield GatewayPort(reader, writer, route)
    finally:
        writer.close()


def _unreachable(route: GatewayRoute, error: OSError) -> GatewayUnreachable:
    match error:
        case TimeoutError():
            why = "timed out"
        case socket.gaierror():
            why = str(error.strerror)
        case _:
            why = os.strerror(error.errno) if error.errno else str(error)
    return GatewayUnreachable(f"{route.shown}: {why}", request=route.host)
