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

from holdfast.control.controller import Controller, give_way
from holdfast.control.links import NotItsOwn
from holdfast.events import AgentJoined, OperatorEvent, paths
from holdfast.events.bounds import Decoder
from holdfast.events.operator import UNTIL
from holdfast.events.orders import (
    PROTOCOL,
    Order,
    agent_message_decoder,
    encode,
    messages,
)
from holdfast.guard.door import AgentsWebSocket, Arrival, Server
from holdfast.guard.keys import Holder, Keys, Newcomer, NodeAgent, Operator
from holdfast.guard.limits import LIMITS, Bucket, Limits
from holdfast.job.silence import Silence
from holdfast.launch.code.archive import archive_path

log = logging.getLogger("holdfast.controller")

_GONE = (WebSocketDisconnect, WebSocketDisconnected)
"""The other end has closed the connection, or we had."""


class _Peer:
    """One agent's WebSocket; orders go out in the order in which they were given."""

    def __init__(self, websocket: WebSocket, arrival: Arrival, backlog: int) -> None:
        self._websocket = websocket
        self._arrival = arrival
        self._orders: asyncio.Queue[bytes | Callable[[], None] | None] = asyncio.Queue(backlog)

    def send(self, order: Order) -> None:
        self._put(encode(order))

    def then(self, act: Callable[[], None]) -> None:
        self._put(act)

    def close(self) -> None:
        self._put(None)

    def _put(self, order: bytes | Callable[[], None] | None) -> None:
        """An agent that does not read is cut off: it is told all it has missed when it joins again."""
        try:
            self._orders.put_nowait(order)
        except asyncio.QueueFull:
            log.warning("an agent has not read its last %s orders; it is cut off", self._orders.maxsize)
            self._arrival.cut()

    async def pump(self) -> None:
        """Send what is queued until the connection is closed from either side."""
        while (order := await self._orders.get()) is not None:
            if callable(order):
                order()
                continue
            try:
                await self._websocket.send_bytes(order)
            except _GONE:
                return
        await self._websocket.close()


_NOT_UNDERSTOOD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, NotItsOwn)
"""What garbage raises: for its form, or for its meaning."""


class _TooLarge(Exception):
    """A request has a longer body than is read."""


_enrolment = msgspec.json.Decoder(dict[str, str])
_HOLDERS: dict[str, type[Holder]] = {paths.AGENT: NodeAgent, paths.ENROL: Newcomer}
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Port:
    """The controller's one port: for agents their WebSocket and the code, for the operator commands; each by token."""

    def __init__(
        self,
        controller: Controller,
        keys: Keys,
        code: Path | None = None,
        limits: Limits = LIMITS,
        generation: Callable[[int, str], int | None] = lambda _node, _address: None,
        first_code: str = "",
    ) -> None:
        self._controller = controller
        self._generation = generation
        self._keys = keys
        self._limits = limits
        self._buckets: dict[NodeAgent, Bucket] = {}
        self._code = code
        self._first_code = first_code
        """Digest of what the run was started with: who enrols may have it before it is told to start anything."""
        self._routes = Starlette(
            routes=[
                WebSocketRoute(paths.AGENT, self._agent),
                Route(paths.CODE + "{digest}", self._serve_code),
                Route(paths.ENROL, self._enrol, methods=["POST"]),
                *(Route(path, self._taking(kind), methods=["POST"]) for kind, path in paths.REQUESTS.items()),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a connection whose token allows what it asks; refuse any other before it learns what there is."""
        connection = HTTPConnection(scope)
        holder = self._keys.holder_of(connection.headers.get("authorization", ""))
        # Not `connection.url`: the sender's Host header is a part of that.
        path: str = scope["path"]
        if isinstance(holder, _taken_by(path)):
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

    def _taking(self, kind: type[OperatorEvent]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that takes one kind of request in as an event of ours, of now."""
        decoder: Decoder[OperatorEvent] = Decoder(kind)

        async def endpoint(request: Request) -> Response:
            try:
                asked, until = decoder.decode(await self._body(request)), _until(request)
                if time.monotonic() > until:
                    return JSONResponse({"error": "too late: whoever asked has been told so"}, status_code=408)
                self._controller.ask(asked)
            except _NOT_UNDERSTOOD as error:
                return JSONResponse({"error": "not understood", "detail": str(error)}, status_code=400)
            except _TooLarge:
                return JSONResponse({"error": "too large"}, status_code=413)
            except AssertionError as error:
                give_way(error)
            if self._controller.holding:
                return JSONResponse({"error": "held until the log can be written"}, status_code=503)
            return JSONResponse({"ok": True})

        return endpoint

    async def _enrol(self, request: Request) -> Response:
        """Tell whoever came to life in a node slot which generation it is, with that one's token."""
        holder: Newcomer = request.scope["holder"]
        try:
            address = _enrolment.decode(await self._body(request))["address"]
        except (*_NOT_UNDERSTOOD, _TooLarge) as error:
            return JSONResponse({"error": "not understood", "detail": str(error)}, status_code=400)
        generation = self._generation(holder.node, address)
        if generation is None:
            return JSONResponse({"error": "it is not known yet who you are"}, status_code=404)
        token = self._keys.of_node(holder.node, generation)
        return JSONResponse({"generation": generation, "token": token, "code": self._first_code})

    async def _body(self, request: Request) -> bytes:
        """All of a request's body; raises _TooLarge."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limits.body_bytes:
                raise _TooLarge
        return body

    async def _agent(self, websocket: WebSocket) -> None:
        await websocket.accept()
        holder: NodeAgent = websocket.scope["holder"]
        arrival: Arrival = websocket.state.arrival
        try:
            first = agent_message_decoder.decode(await websocket.receive_bytes())
        except _GONE:
            return
        except _NOT_UNDERSTOOD:
            first = None
        if not isinstance(first, AgentJoined) or first.protocol != PROTOCOL:
            log.warning("refused an agent that does not speak version %s of the protocol: %.200r", PROTOCOL, first)
            await _close(websocket)
            return
        if NodeAgent(first.node, first.generation) != holder:
            log.warning("refused %s, which said it was node%s", holder, first.node)
            await _close(websocket)
            return
        peer = _Peer(websocket, arrival, self._limits.orders)
        pump = asyncio.ensure_future(peer.pump())
        link = None
        try:
            link = self._controller.agent_joined(peer, first)
            if link is not None:
                arrival.settle()
            while True:
                text = await self._hear(websocket, holder)
                if link is not None:
                    self._controller.agent_said(link, messages(text))
        except _GONE:
            pass
        except _NOT_UNDERSTOOD as error:
            log.error("%s's agent said something that is not of this protocol: %.500s", holder, error)
            await _close(websocket)
        except AssertionError as error:
            give_way(error)
        finally:
            pump.cancel()
            if link is not None:
                self._controller.agent_left(link)

    async def _hear(self, websocket: WebSocket, holder: NodeAgent) -> bytes:
        """The agent's next word, as soon as its node may say one; what is not read waits at the sender's."""
        bucket = self._buckets.setdefault(holder, Bucket(self._limits))
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
        arrival: Arrival = request.state.arrival
        arrival.settle(self._limits.download_s)
        return FileResponse(archive, media_type="application/x-tar")


def _taken_by(path: str) -> type[Holder]:
    """Whose token a path takes: the operator's, unless it is for others."""
    return NodeAgent if path.startswith(paths.CODE) else _HOLDERS.get(path, Operator)


def _until(request: Request) -> float:
    """Until when a request may be obeyed, in this machine's monotonic seconds; raises MsgspecError for nonsense."""
    return msgspec.json.decode(request.headers.get(UNTIL, "1e300"), type=float)


async def _close(websocket: WebSocket) -> None:
    """Close a connection that does not keep to the protocol; it may be closed already."""
    with contextlib.suppress(*_GONE):
        await websocket.close(code=1002)


def listening(
    port: ASGIApp, *, nodes: int, silence: Silence, limits: Limits = LIMITS, tls: ssl.SSLContext | None = None
) -> Server:
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
        ws_ping_interval=silence.ping_s,
        ws_ping_timeout=silence.pong_s,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return Server(config, limits=limits, nodes=nodes, tls=tls)
