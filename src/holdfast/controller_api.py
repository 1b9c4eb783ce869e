"""Owns a controller's one port: who may ask what of it, agents' connections, and what is taken in as events.

One application answers on every socket it is served on: agents come in over TCP, this user's commands over a Unix
socket; each shows a token that allows what it asks, and without one nothing answers but the refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from holdfast.control.agent_connections import ForeignMessage
from holdfast.control.controller import Controller, crash
from holdfast.events import AgentConnected, RequestEvent
from holdfast.events.requests import EXPIRES
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.launch.code.archive import archive_path
from holdfast.protocol import routes
from holdfast.protocol.orders import PROTOCOL, Order, agent_message_decoder, decode_frame, encode
from holdfast.protocol.validation import ValidatingDecoder
from holdfast.security.admission import AdmissionServer, AgentsWebSocket, PendingConnection
from holdfast.security.api_limits import LIMITS, ApiLimits, NodeRateLimiter
from holdfast.security.tokens import NodeAgent, Principal, TokenIssuer, UnassignedNode, User

log = logging.getLogger("holdfast.controller")

_DISCONNECTED = (WebSocketDisconnect, WebSocketDisconnected)
"""The other end has closed the connection, or we had."""


class _WebSocketPeer:
    """One agent's WebSocket; orders go out in the order in which they were given."""

    def __init__(self, websocket: WebSocket, arrival: PendingConnection, backlog: int) -> None:
        self._websocket = websocket
        self._arrival = arrival
        self._orders: asyncio.Queue[bytes | Callable[[], None] | None] = asyncio.Queue(backlog)

    def send(self, order: Order) -> None:
        self._put(encode(order))

    def after_sent(self, act: Callable[[], None]) -> None:
        self._put(act)

    def close(self) -> None:
        self._put(None)

    def _put(self, order: bytes | Callable[[], None] | None) -> None:
        """An agent that does not read is cut off: it is told all it has missed when it joins again."""
        try:
            self._orders.put_nowait(order)
        except asyncio.QueueFull:
            log.warning("an agent has not read its last %s orders; it is cut off", self._orders.maxsize)
            self._arrival.abort()

    async def send_queued(self) -> None:
        """Send what is queued until the connection is closed from either side."""
        while (order := await self._orders.get()) is not None:
            if callable(order):
                order()
                continue
            try:
                await self._websocket.send_bytes(order)
            except _DISCONNECTED:
                return
        await self._websocket.close()


_BAD_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, ForeignMessage)
"""What garbage raises: for its form, or for its meaning."""


class _TooLarge(Exception):
    """A request has a longer body than is read."""


_enrolment = msgspec.json.Decoder(dict[str, str])
_PRINCIPALS: dict[str, type[Principal]] = {routes.AGENT_SOCKET: NodeAgent, routes.BOOTSTRAP: UnassignedNode}
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ControllerApi:
    """The controller's one port: for agents their WebSocket and the code, for the operator commands; each by token."""

    def __init__(
        self,
        controller: Controller,
        tokens: TokenIssuer,
        code: Path | None = None,
        limits: ApiLimits = LIMITS,
        generation: Callable[[int, str], int | None] = lambda _node, _address: None,
        first_code: str = "",
    ) -> None:
        self._controller = controller
        self._generation = generation
        self._tokens = tokens
        self._limits = limits
        self._rate_limiters: dict[NodeAgent, NodeRateLimiter] = {}
        self._code = code
        self._first_code = first_code
        """Digest of what the run was started with: who enrols may have it before it is told to start anything."""
        self._routes = Starlette(
            routes=[
                WebSocketRoute(routes.AGENT_SOCKET, self._agent_socket),
                Route(routes.CODE + "{digest}", self._serve_code),
                Route(routes.BOOTSTRAP, self._bootstrap, methods=["POST"]),
                *(
                    Route(path, self._request_endpoint(kind), methods=["POST"])
                    for kind, path in routes.REQUEST_ROUTES.items()
                ),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a connection whose token allows what it asks; refuse any other before it learns what there is."""
        connection = HTTPConnection(scope)
        holder = self._tokens.principal_of_header(connection.headers.get("authorization", ""))
        # Not `connection.url`: the sender's Host header is a part of that.
        path: str = scope["path"]
        if isinstance(holder, _required_principal(path)):
            scope["holder"] = holder
            await self._routes(scope, receive, send)
            return
        peer = connection.client.host if connection.client else "this machine"
        shown = "a wrong or missing token" if holder is None else f"the token of {holder}"
        log.warning("refused a connection from %s to %r with %s", peer, path[:200], shown)
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).close(code=1008)
        else:
            await JSONResponse({"error": "refused"}, status_code=401)(scope, receive, send)

    def _request_endpoint(self, kind: type[RequestEvent]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that takes one kind of request in as an event of ours, of now."""
        decoder: ValidatingDecoder[RequestEvent] = ValidatingDecoder(kind)

        async def endpoint(request: Request) -> Response:
            try:
                asked, until = decoder.decode(await self._body(request)), _expires(request)
                if time.monotonic() > until:
                    return JSONResponse({"error": "too late: whoever asked has been told so"}, status_code=408)
                self._controller.handle_request(asked)
            except _BAD_MESSAGE as error:
                return JSONResponse({"error": "not understood", "detail": str(error)}, status_code=400)
            except _TooLarge:
                return JSONResponse({"error": "too large"}, status_code=413)
            except AssertionError as error:
                crash(error)
            if self._controller.write_blocked:
                return JSONResponse({"error": "held until the log can be written"}, status_code=503)
            return JSONResponse({"ok": True})

        return endpoint

    async def _bootstrap(self, request: Request) -> Response:
        """Tell whoever came to life in a node slot which generation it is, with that one's token."""
        holder: UnassignedNode = request.scope["holder"]
        try:
            address = _enrolment.decode(await self._body(request))["address"]
        except (*_BAD_MESSAGE, _TooLarge) as error:
            return JSONResponse({"error": "not understood", "detail": str(error)}, status_code=400)
        generation = self._generation(holder.node, address)
        if generation is None:
            return JSONResponse({"error": "it is not known yet who you are"}, status_code=404)
        token = self._tokens.node_token(holder.node, generation)
        return JSONResponse({"generation": generation, "token": token, "code": self._first_code})

    async def _body(self, request: Request) -> bytes:
        """All of a request's body; raises _TooLarge."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limits.body_bytes:
                raise _TooLarge
        return body

    async def _agent_socket(self, websocket: WebSocket) -> None:
        await websocket.accept()
        holder: NodeAgent = websocket.scope["holder"]
        arrival: PendingConnection = websocket.state.pending_connection
        try:
            first = agent_message_decoder.decode(await websocket.receive_bytes())
        except _DISCONNECTED:
            return
        except _BAD_MESSAGE:
            first = None
        if not isinstance(first, AgentConnected) or first.protocol != PROTOCOL:
            log.warning("refused an agent that does not speak version %s of the protocol: %.200r", PROTOCOL, first)
            await _close(websocket)
            return
        if NodeAgent(first.node, first.generation) != holder:
            log.warning("refused %s, which said it was node%s", holder, first.node)
            await _close(websocket)
            return
        peer = _WebSocketPeer(websocket, arrival, self._limits.max_queued_orders)
        pump = asyncio.ensure_future(peer.send_queued())
        link = None
        try:
            link = self._controller.agent_connected(peer, first)
            if link is not None:
                arrival.admit()
            while True:
                text = await self._receive(websocket, holder)
                if link is not None:
                    self._controller.agent_messages(link, decode_frame(text))
        except _DISCONNECTED:
            pass
        except _BAD_MESSAGE as error:
            log.error("%s's agent said something that is not of this protocol: %.500s", holder, error)
            await _close(websocket)
        except AssertionError as error:
            crash(error)
        finally:
            pump.cancel()
            if link is not None:
                self._controller.agent_disconnected(link)

    async def _receive(self, websocket: WebSocket, holder: NodeAgent) -> bytes:
        """The agent's next word, as soon as its node may say one; what is not read waits at the sender's."""
        bucket = self._rate_limiters.setdefault(holder, NodeRateLimiter(self._limits))
        text = await websocket.receive_bytes()
        if (wait_s := bucket.take(len(text), time.monotonic())) > 0:
            log.warning(
                "%s says more than %.0f bytes a second; it is read more slowly", holder, self._limits.node_bytes_per_s
            )
            await asyncio.sleep(wait_s)
        return text

    async def _serve_code(self, request: Request) -> Response:
        """Give out code of this run: that of its start, or of an update."""
        digest: str = request.path_params["digest"]
        archive = archive_path(self._code, digest) if self._code and _DIGEST.fullmatch(digest) else None
        if archive is None or not archive.is_file():
            return JSONResponse({"error": "there is no such archive"}, status_code=410)
        arrival: PendingConnection = request.state.pending_connection
        arrival.admit(self._limits.download_s)
        return FileResponse(archive, media_type="application/x-tar")


def _required_principal(path: str) -> type[Principal]:
    """Whose token a path takes: the operator's, unless it is for others."""
    return NodeAgent if path.startswith(routes.CODE) else _PRINCIPALS.get(path, User)


def _expires(request: Request) -> float:
    """Until when a request may be obeyed, in this machine's monotonic seconds; raises MsgspecError for nonsense."""
    return msgspec.json.decode(request.headers.get(EXPIRES, "1e300"), type=float)


async def _close(websocket: WebSocket) -> None:
    """Close a connection that does not keep to the protocol; it may be closed already."""
    with contextlib.suppress(*_DISCONNECTED):
        await websocket.close(code=1002)


def make_server(
    port: ASGIApp,
    *,
    nodes: int,
    silence: HeartbeatTimeouts,
    limits: ApiLimits = LIMITS,
    tls: ssl.SSLContext | None = None,
) -> AdmissionServer:
    """The port as it is served: quiet about itself, with limits, at once over when the run is."""
    config = uvicorn.Config(
        port,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # there is no proxy, and nobody chooses the address that a refusal is logged with
        h11_max_incomplete_event_size=limits.header_bytes,
        ws=AgentsWebSocket,
        ws_max_size=limits.message_bytes,
        ws_per_message_deflate=False,
        ws_ping_interval=silence.ping_interval_s,
        ws_ping_timeout=silence.pong_timeout_s,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return AdmissionServer(config, limits=limits, nodes=nodes, tls=tls)
