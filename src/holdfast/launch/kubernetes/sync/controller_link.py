"""A connection to the port that the controller's pod serves to clients (incluster/sync_server.py).

TLS runs end to end inside the API server's port-forward, or through the cluster's Gateway, so the token reaches only a
holder of the run's key.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from holdfast.launch.kubernetes.client.api_errors import GatewayUnreachable
from holdfast.launch.kubernetes.client.gateway_port import GatewayRoute, connect_to_gateway
from holdfast.launch.kubernetes.client.pod_port import PortClosed
from holdfast.launch.kubernetes.incluster.client_connection import Opening
from holdfast.launch.kubernetes.incluster.sync_server import SYNC_PORT
from holdfast.run_dir import RunDir
from holdfast.security.tls import CONTROLLER_NAME, client_context

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.client.cluster import ClusterClient

Result = TypeVar("Result")

CHUNK_BYTES = 1 << 18


class Port(Protocol):
    """A connection to a port, on whatever way."""

    async def send(self, data: bytes) -> None: ...

    async def receive(self) -> bytes: ...


class ControllerLink:
    """A TLS connection through a port."""

    def __init__(self, port: Port, context: ssl.SSLContext, server_name: str = CONTROLLER_NAME) -> None:
        self._port = port
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._sending = asyncio.Lock()

    async def handshake(self) -> None:
        """Authenticate the pod; raises PortClosed if it lacks the run's key."""
        await self._exchange(self._tls.do_handshake)

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        self._tls.write(data)
        await self._flush()

    async def output(self) -> AsyncIterator[bytes]:
        """What the pod sends, until it ends the connection; raises an error if the connection is cut."""
        while data := await self._exchange(self._read):
            yield data

    def _read(self) -> bytes:
        try:
            return self._tls.read(CHUNK_BYTES)
        except ssl.SSLZeroReturnError:
            return b""

    async def _exchange(self, step: Callable[[], Result]) -> Result:
        """Repeat a step with what the pod sends until the step has enough."""
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self._flush()
                self._incoming.write(await self._port.receive())
            except ssl.SSLError as error:
                raise PortClosed(f"the connection to the controller's pod is not the run's: {error}") from error
            else:
                await self._flush()
                return result

    async def _flush(self) -> None:
        async with self._sending:  # what two tasks send must not change its order
            if data := self._outgoing.read():
                await self._port.send(data)


@asynccontextmanager
async def open_link(
    cluster: ClusterClient, pod: str, folder: RunDir, opening: Opening, gateway: GatewayRoute | None = None
) -> AsyncGenerator[ControllerLink]:
    """Connect to the controller and begin a command; raises ClusterError and PortClosed.

    The connection is a port-forward to its pod, or leads through the cluster's Gateway.
    """
    if gateway is None:
        async with cluster.connect_to_port(pod, SYNC_PORT) as port:
            link = ControllerLink(port, client_context(folder.ca))
            await link.handshake()
            await link.send(opening.line())
            yield link
        return
    context = client_context(folder.ca)
    context.check_hostname = False  # the Gateway routes by the name; the run's CA has signed one certificate only
    async with connect_to_gateway(gateway) as port:
        link = ControllerLink(port, context, gateway.host)
        try:
            await link.handshake()
        except PortClosed as error:
            why = f"{gateway.shown}: {error}; no route has the name, or the Gateway ends TLS itself"
            raise GatewayUnreachable(why, request=gateway.host) from error
        await link.send(opening.line())
        yield link


def opening(folder: RunDir, command: str, *, digest: str = "", size: int = 0) -> Opening:
    """The first line of a connection for a run."""
    return Opening(token=folder.token.read_text(), command=command, digest=digest, bytes=size)
