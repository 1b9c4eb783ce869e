"""The controller's port: agent connections, user requests and metrics, each authorised by token.

One application serves every socket: agents connect over TCP, this user's commands over a Unix socket. Without a token
that allows the request, the only answer is a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
import time
from collections import Counter
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
from holdfast.control.protocol_mismatch import protocol_mismatch
from holdfast.control.trace_store import TraceRefused, TraceStore
from holdfast.events import AgentConnected, RequestEvent
from holdfast.events.requests import EXPIRES
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.launch.code.archive import archive_path
from holdfast.observe.metrics_endpoint import MetricsEndpoint
from holdfast.protocol import routes
from holdfast.protocol.orders import (
    PROTOCOL,
    Order,
    ProtocolOffer,
    agent_message_decoder,
    decode_frame,
    decode_offer,
    encode,
)
from holdfast.protocol.validation import ValidatingDecoder
from holdfast.security.admission import AdmissionServer, AgentsWebSocket, PendingConnection
from holdfast.security.api_limits import LIMITS, ApiLimits, NodeRateLimiter
from holdfast.security.tokens import MetricsReader, NodeAgent, Principal, TokenIssuer, UnassignedNode, User

log = logging.getLogger("holdfast.controller")

_DISCONNECTED = (WebSocketDisconnect, WebSocketDisconnected)
"""Either end has closed the connection."""


LOOPBACK = "127.0.0.1"
CHUNK_BYTES = 64 * 1024
MAX_REASON_CHARS = 120
"""Of a close frame, which holds 123 bytes."""


class _WebSocketPeer:
    """One agent's WebSocket; orders are sent in the order in which they were queued."""

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
        """Queue an order; an agent that does not read is disconnected, and catches up when it reconnects."""
        try:
            self._orders.put_nowait(order)
        except asyncio.QueueFull:
            log.warning("an agent has not read its last %s orders; it is cut off", self._orders.maxsize)
            self._arrival.abort()

    async def send_queued(self) -> None:
        """Send queued orders until either end closes the connection."""
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
"""Errors that malformed or invalid messages raise."""


class _TooLarge(Exception):
    """A request's body is longer than the limit."""


_enrolment = msgspec.json.Decoder(dict[str, str])
_PRINCIPALS: dict[str, tuple[type[Principal], ...]] = {
    routes.AGENT_SOCKET: (NodeAgent,),
    routes.QUORUM: (NodeAgent,),
    routes.BOOTSTRAP: (UnassignedNode,),
    routes.METRICS: (MetricsReader, User),
}
"""Who may use a path; any other is for the user."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ControllerApi:
    """The controller's one port: the WebSocket and the code for agents, requests for the user; each by token."""

    def __init__(
        self,
        controller: Controller,
        tokens: TokenIssuer,
        code: Path | None = None,
        limits: ApiLimits = LIMITS,
        *,
        metrics: MetricsEndpoint,
        traces: TraceStore | None = None,
        generation: Callable[[int, str], int | None] = lambda _node, _address: None,
        first_code: str = "",
        quorum_port: Callable[[], int] | None = None,
    ) -> None:
        self._controller = controller
        self._generation = generation
        self._tokens = tokens
        self._limits = limits
        self._rate_limiters: dict[NodeAgent, NodeRateLimiter] = {}
        self._code = code
        self._traces = traces
        self._first_code = first_code
        """Digest of the run's initial code: a bootstrapping agent may download it before its first start order."""
        self._quorum_port = quorum_port
        """The port of the quorum service on this machine, if ranks reach it through this one."""
        self._relayed: Counter[NodeAgent] = Counter()
        self._mismatched = set[NodeAgent]()
        """Agents that have been refused for the version of their protocol."""
        self._routes = Starlette(
            routes=[
                WebSocketRoute(routes.AGENT_SOCKET, self._agent_socket),
                WebSocketRoute(routes.QUORUM, self._relay_quorum),
                Route(routes.CODE + "{digest}", self._serve_code),
                Route(routes.TRACES + "{name:path}", self._store_trace, methods=["PUT"]),
                Route(routes.BOOTSTRAP, self._bootstrap, methods=["POST"]),
                Route(routes.METRICS, metrics.answer),
                Route(routes.CLOCK, _clock),
                *(
                    Route(path, self._request_endpoint(kind), methods=["POST"])
                    for kind, path in routes.REQUEST_ROUTES.items()
                ),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route a request whose token allows it; refuse any other before it reveals whether the path exists."""
        connection = HTTPConnection(scope)
        holder = self._tokens.principal_of_header(connection.headers.get("authorization", ""))
        # Not `connection.url`, which includes the sender's Host header.
        path: str = scope["path"]
        if isinstance(holder, _allowed_principals(path)):
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
        """An endpoint that decodes one type of request and passes it to the controller."""
        decoder: ValidatingDecoder[RequestEvent] = ValidatingDecoder(kind)

        async def endpoint(request: Request) -> Response:
            try:
                asked, until = decoder.decode(await self._body(request)), _expires(request)
                if time.monotonic() > until:
                    return JSONResponse({"error": "the request expired and will not run"}, status_code=408)
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
        """Send a bootstrapping process in a node slot its generation, and the token of that generation."""
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
        first = None
        try:
            hello = await websocket.receive_bytes()
            if not (offer := decode_offer(hello)).spoken:
                await self._refuse_protocol(websocket, holder, offer)
                return
            first = agent_message_decoder.decode(hello)
        except _DISCONNECTED:
            return
        except _BAD_MESSAGE as error:
            log.warning("%s's agent sent a hello that is not of this protocol: %.500s", holder, error)
        if not isinstance(first, AgentConnected):
            await _close(websocket)
            return
        if NodeAgent(first.node, first.generation) != holder:
            log.warning("refused %s, which joined as node%s", holder, first.node)
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
                    self._controller.agent_messages(link, decode_frame(text, from_later=first.protocol > PROTOCOL))
        except _DISCONNECTED:
            pass
        except _BAD_MESSAGE as error:
            log.error("%s's agent sent a message that is not of this protocol: %.500s", holder, error)
            await _close(websocket)
        except AssertionError as error:
            crash(error)
        finally:
            pump.cancel()
            if link is not None:
                self._controller.agent_disconnected(link)

    async def _refuse_protocol(self, websocket: WebSocket, holder: NodeAgent, offer: ProtocolOffer) -> None:
        """Refuse an agent of a version that this controller does not speak; report it once."""
        finding = protocol_mismatch(holder.node, offer)
        if holder not in self._mismatched:
            self._mismatched.add(holder)
            self._controller.report(finding)
        await _close(websocket, finding.what)

    async def _receive(self, websocket: WebSocket, holder: NodeAgent) -> bytes:
        """The agent's next message, once its node may send one; unread data waits at the sender."""
        bucket = self._rate_limiters.setdefault(holder, NodeRateLimiter(self._limits))
        text = await websocket.receive_bytes()
        if (wait_s := bucket.take(len(text), time.monotonic())) > 0:
            log.warning(
                "%s says more than %.0f bytes a second; it is read more slowly", holder, self._limits.node_bytes_per_s
            )
            await asyncio.sleep(wait_s)
        return text

    async def _relay_quorum(self, websocket: WebSocket) -> None:
        """Carry a connection of one of a node's ranks to the quorum service, until either end closes it."""
        holder: NodeAgent = websocket.scope["holder"]
        if self._quorum_port is None or self._relayed[holder] >= self._limits.quorum_connections:
            await websocket.close(code=1008)
            return
        await websocket.accept()
        arrival: PendingConnection = websocket.state.pending_connection
        arrival.admit()
        self._relayed[holder] += 1
        try:
            reader, writer = await asyncio.open_connection(LOOPBACK, self._quorum_port())
            try:
                await _carry(websocket, reader, writer)
            finally:
                writer.close()
        except OSError:  # the service is being restarted; the rank connects again
            await _close(websocket)
        finally:
            self._relayed[holder] -= 1

    async def _store_trace(self, request: Request) -> Response:
        """Store the trace of a profile that an agent uploads."""
        if self._traces is None:
            return JSONResponse({"error": "no traces are kept"}, status_code=404)
        arrival: PendingConnection = request.state.pending_connection
        arrival.admit(self._limits.download_s)
        try:
            await self._traces.store(request.path_params["name"], request.stream())
        except TraceRefused as refused:
            return JSONResponse({"error": str(refused)}, status_code=413)
        except OSError as error:
            return JSONResponse({"error": str(error)}, status_code=507)
        return JSONResponse({"ok": True})

    async def _serve_code(self, request: Request) -> Response:
        """Send an archive of the run's code: the initial one, or that of an update."""
        digest: str = request.path_params["digest"]
        archive = archive_path(self._code, digest) if self._code and _DIGEST.fullmatch(digest) else None
        if archive is None or not archive.is_file():
            return JSONResponse({"error": "there is no such archive"}, status_code=410)
        arrival: PendingConnection = request.state.pending_connection
        arrival.admit(self._limits.download_s)
        return FileResponse(archive, media_type="application/x-tar")


async def _carry(websocket: WebSocket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes both ways until either end closes."""

    async def back() -> None:
        with contextlib.suppress(*_DISCONNECTED, OSError):
            while data := await reader.read(CHUNK_BYTES):
                await websocket.send_bytes(data)
            await websocket.close()

    sending = asyncio.ensure_future(back())
    try:
        while True:
            writer.write(await websocket.receive_bytes())
            await writer.drain()
    except _DISCONNECTED:
        pass
    finally:
        sending.cancel()


def _allowed_principals(path: str) -> tuple[type[Principal], ...]:
    """Who may use a path."""
    return (NodeAgent,) if path.startswith((routes.CODE, routes.TRACES)) else _PRINCIPALS.get(path, (User,))


async def _clock(_request: Request) -> Response:
    """Monotonic seconds of this machine."""
    return Response(repr(time.monotonic()), media_type="text/plain")


def _expires(request: Request) -> float:
    """Monotonic seconds on this machine until which a request may run; raises MsgspecError if malformed."""
    return msgspec.json.decode(request.headers.get(EXPIRES, "1e300"), type=float)


async def _close(websocket: WebSocket, reason: str = "") -> None:
    """Close a connection that violates the protocol; it may be closed already."""
    with contextlib.suppress(*_DISCONNECTED):
        await websocket.close(code=1002, reason=reason[:MAX_REASON_CHARS])


def make_server(
    port: ASGIApp,
    *,
    nodes: int,
    silence: HeartbeatTimeouts,
    limits: ApiLimits = LIMITS,
    tls: ssl.SSLContext | None = None,
) -> AdmissionServer:
    """The server of the port: no access log, with limits, and an immediate shutdown when the run ends."""
    config = uvicorn.Config(
        port,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # there is no proxy, and clients must not choose the address that a refusal is logged with
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
