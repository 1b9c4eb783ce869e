"""A connection to the port that the controller's pod serves to clients (incluster/sync_server.py).

TLS runs end to end inside the API server's port-forward, so the token reaches only a holder of the run's key.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from holdfast.launch.kubernetes.client.pod_port import PodPort, PortClosed
from holdfast.launch.kubernetes.incluster.client_connection import Opening
from holdfast.launch.kubernetes.incluster.sync_server import SYNC_PORT
from holdfast.run_dir import RunDir
from holdfast.security.tls import CONTROLLER_NAME, client_context

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.client.cluster import ClusterClient

Result = TypeVar("Result")

CHUNK_BYTES = 1 << 18


class ControllerLink:
    """A TLS connection through a port of a pod."""

    def __init__(self, port: PodPort, context: ssl.SSLContext) -> None:
        self._port = port
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=CONTROLLER_NAME)
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
    cluster: ClusterClient, pod: str, folder: RunDir, opening: Opening
) -> AsyncGenerator[ControllerLink]:
    """Connect to the controller's pod and begin a command; raises ClusterError and PortClosed."""
    async with cluster.connect_to_port(pod, SYNC_PORT) as port:
        link = ControllerLink(port, client_context(folder.ca))
        await link.handshake()
        await link.send(opening.line())
        yield link


def opening(folder: RunDir, command: str, *, digest: str = "", size: int = 0) -> Opening:
    """The first line of a connection for a run."""
    return Opening(token=folder.token.read_text(), command=command, digest=digest, bytes=size)
