"""Admits connections to the controller's port: counts and times each from its accept, with TLS for remote peers.

uvicorn sees a connection only after the TLS handshake, and waits forever for a request's headers; without this module
an unauthenticated client could hold the controller's descriptors. Tokens are checked elsewhere (tokens.py).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from asyncio import sslproto
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from holdfast.security.api_limits import CONTROLLER_FILES, FILES_PER_NODE, MIN_PENDING, ApiLimits

log = logging.getLogger("holdfast.controller")


TLS_RECORD_BYTES = 16 * 1024
"""Maximum size of a TLS record. asyncio keeps a 256 KiB buffer per connection: half a GiB at 2,048 nodes."""


BACKLOG = 100
"""Connections accepted in one go: they are open before `PendingConnections` counts any of them."""


class PendingConnection:
    """One connection that has not been admitted yet."""

    def __init__(self, transport: asyncio.Transport, pending: PendingConnections, within_s: float) -> None:
        self._transport = transport
        self._pending = pending
        self._timer = asyncio.get_running_loop().call_later(within_s, self.abort)

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def admit(self, timeout_s: float = 0.0) -> None:
        """Admit the connection, for `timeout_s` seconds or, with 0, without limit."""
        self._timer.cancel()
        self._pending.remove(self)
        if timeout_s:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self.abort)

    def abort(self) -> None:
        """Abort the connection immediately."""
        self.admit()
        self._transport.abort()


class PendingConnections:
    """Connections that have not been admitted yet; beyond the capacity, a new connection evicts the oldest."""

    def __init__(self, capacity: int, within_s: float) -> None:
        self._capacity = capacity
        self._timeout_s = within_s
        self._connections: dict[PendingConnection, None] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, transport: asyncio.Transport) -> PendingConnection:
        if len(self._connections) >= self._capacity:
            self._evict_oldest()
        connection = PendingConnection(transport, self, self._timeout_s)
        self._connections[connection] = None
        return connection

    def remove(self, connection: PendingConnection) -> None:
        self._connections.pop(connection, None)

    def _evict_oldest(self) -> None:
        """Forget connections that are already closing; if there are none, abort the oldest."""
        for connection in [connection for connection in self._connections if connection.is_closing]:
            connection.admit()
        if len(self._connections) >= self._capacity:
            log.warning("%s connections have yet to show a token; the oldest are cut off", self._capacity)
            next(iter(self._connections)).abort()


class AgentsWebSocket(WebSocketsSansIOProtocol):
    """Agents send binary frames. Text frames are treated as binary: uvicorn logs a traceback on bad UTF-8."""

    def handle_text(self, event: Frame) -> None:
        self.handle_bytes(event)

    def keepalive_timeout(self) -> None:
        """Abort a silent peer without waiting for TLS shutdown (30 s) or for unsent data."""
        self.transport.abort()


class AdmissionServer(uvicorn.Server):
    """uvicorn with admission control.

    The application finds its `PendingConnection` in `scope["state"]["pending_connection"]`.
    """

    def __init__(self, config: uvicorn.Config, *, limits: ApiLimits, nodes: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = max(MIN_PENDING, may_open - CONTROLLER_FILES - FILES_PER_NODE * nodes)
        self._accept_backlog = min(BACKLOG, free // 2)
        self.pending = PendingConnections(
            min(limits.max_pending + nodes, free - self._accept_backlog), limits.admission_s
        )
        self._limits = limits
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on inherited sockets; use TLS on those that other machines can reach."""
        loop = asyncio.get_running_loop()
        sslproto.SSLProtocol.max_size = TLS_RECORD_BYTES
        self.servers: list[asyncio.base_events.Server] = []
        for listener in sockets or []:
            tls = None if listener.family is socket.AF_UNIX else self._tls
            server = await loop.create_server(
                lambda tls=tls: _TlsProtocol(self.pending, self._http_protocol, tls),
                sock=listener,
                backlog=self._accept_backlog,
            )
            self.servers.append(server)
        self.started = True

    def _http_protocol(self, connection: PendingConnection) -> asyncio.Protocol:
        state: dict[str, Any] = {"pending_connection": connection}
        return H11Protocol(self.config, self.server_state, state)


class _TlsProtocol(asyncio.Protocol):
    """A connection before HTTP; buffers early data and passes it on."""

    def __init__(
        self,
        pending: PendingConnections,
        http_protocol: Callable[[PendingConnection], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._pending = pending
        self._http_protocol = http_protocol
        self._tls = tls
        self._early_data = bytearray()
        self._lost = False
        self._handshake_task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = cast("asyncio.Transport", transport)
        connection = self._pending.add(raw)
        if self._tls is None:
            self._hand_over(connection, raw)
        else:
            raw.pause_reading()  # until TLS can read
            self._handshake_task = asyncio.ensure_future(self._handshake(connection, raw, self._tls))

    def data_received(self, data: bytes) -> None:
        """Buffer data that a client sends with the end of its handshake: it arrives before `start_tls` returns."""
        self._early_data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    async def _handshake(self, connection: PendingConnection, raw: asyncio.Transport, tls: ssl.SSLContext) -> None:
        peer = raw.get_extra_info("peername")
        try:
            # asyncio's TLS timeouts are longer than the admission timeout.
            secured = await asyncio.get_running_loop().start_tls(raw, self, tls, server_side=True)
        except OSError as error:  # includes ssl.SSLError
            log.warning("no TLS with %s: %s", peer[0] if peer else "somebody", error)
            secured = None
        if secured is None or self._lost:
            connection.abort()
        else:
            self._hand_over(connection, secured)

    def _hand_over(self, connection: PendingConnection, transport: asyncio.Transport) -> None:
        protocol = self._http_protocol(connection)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._early_data:
            protocol.data_received(bytes(self._early_data))
