"""Restores a run's log and code from the replicas on its nodes, for a controller in an empty folder.

A replica is valid as far as a controller signed it (control/log_replication.py). The valid replica
that most controllers wrote to wins, then the longest: what another has beyond it comes from a controller that ended
before. The target knows whether there was an earlier controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from holdfast.events import ControllerStarted, RunCreated
from holdfast.events.agent_events import LOG_REPLICA_NAME, LOG_REPLICA_REQUIRED, LOG_SIGNATURE
from holdfast.events.log import read_events
from holdfast.findings import Finding, Owner, Severity
from holdfast.launch.code.archive import archive_path
from holdfast.protocol import routes
from holdfast.run_dir import RunDir
from holdfast.security.admission import AdmissionServer
from holdfast.security.api_limits import LIMITS
from holdfast.security.tokens import NodeAgent, TokenIssuer, UnassignedNode

RETRY_LATER = 503
"""HTTP status for an agent whose replica has been received."""
_COPY = re.compile(re.escape(LOG_REPLICA_NAME) + r"|[0-9a-f]{64}")


class _LogReplica(Struct, frozen=True, order=True):
    """A replica with a valid signature, and the values that rank it."""

    incarnations: int
    bytes: int
    node: int
    path: Path


class _LogRestore:
    """The nodes' answers so far, and the port that receives them."""

    def __init__(self, folder: RunDir, keys: TokenIssuer, scratch: Path) -> None:
        self._folder = folder
        self._keys = keys
        self._scratch = scratch
        self.answered: set[int] = set()
        """Slots whose node has uploaded what it had, or is new and has nothing."""
        self.replicas: list[_LogReplica] = []
        self.changed = asyncio.Event()
        self._routes = Starlette(
            routes=[
                WebSocketRoute(routes.AGENT_SOCKET, self._agent_socket),
                Route(routes.BOOTSTRAP, self._bootstrap, methods=["POST"]),
                Route(routes.UPLOADS + "{name}", self._upload, methods=["PUT"]),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        holder = self._keys.principal_of_header(HTTPConnection(scope).headers.get("authorization", ""))
        if isinstance(holder, UnassignedNode if scope["path"] == routes.BOOTSTRAP else NodeAgent):
            scope["holder"] = holder
            await self._routes(scope, receive, send)
        elif scope["type"] == "http":
            await JSONResponse({"error": "refused"}, status_code=401)(scope, receive, send)
        else:
            await WebSocket(scope, receive, send).close(code=1008)

    async def _agent_socket(self, websocket: WebSocket) -> None:
        holder: NodeAgent = websocket.scope["holder"]
        status = RETRY_LATER if holder.node in self.answered else LOG_REPLICA_REQUIRED
        await websocket.send_denial_response(JSONResponse({"error": "the run's log is recalled"}, status_code=status))

    async def _bootstrap(self, request: Request) -> Response:
        holder: UnassignedNode = request.scope["holder"]
        self._on_answer(holder.node)
        return JSONResponse({"error": "it is not known yet who you are"}, status_code=404)

    async def _upload(self, request: Request) -> Response:
        """Receive one file of a node: the log if its signature is valid, code if its digest matches its name."""
        holder: NodeAgent = request.scope["holder"]
        name: str = request.path_params["name"]
        if not _COPY.fullmatch(name):
            return JSONResponse({"error": "no such file is kept"}, status_code=404)
        request.state.pending_connection.admit(LIMITS.download_s)
        part = self._scratch / f"node{holder.node}-{name}"
        digest = hashlib.sha256()
        with part.open("wb") as file:
            async for data in request.stream():
                digest.update(data)
                file.write(data)
        if name == LOG_REPLICA_NAME:
            seal = self._keys.log_signature(digest.digest())
            if hmac.compare_digest(seal, request.headers.get(LOG_SIGNATURE, "")):
                lives = sum(isinstance(event, ControllerStarted) for event in read_events(part))
                self.replicas.append(
                    _LogReplica(incarnations=lives, bytes=part.stat().st_size, node=holder.node, path=part)
                )
            self._on_answer(holder.node)
        elif digest.hexdigest() == name:
            place = archive_path(self._folder.code, name)
            place.parent.mkdir(mode=0o700, exist_ok=True)
            part.rename(place)
        return JSONResponse({"ok": True})

    def _on_answer(self, node: int) -> None:
        self.answered.add(node)
        self.changed.set()


async def restore_log(
    folder: RunDir,
    created: RunCreated,
    keys: TokenIssuer,
    agents: socket.socket,
    make_server: Callable[[ASGIApp], AdmissionServer],
    *,
    slots: int,
    grace_s: float,
) -> Finding:
    """Wait for the nodes, and restore the log from the best replica; returns the finding about it.

    Ends when each slot's node has answered, or `grace_s` after the first answer: silent nodes count as lost.
    """
    scratch = folder.restore_scratch
    scratch.mkdir(mode=0o700, exist_ok=True)
    state = _LogRestore(folder, keys, scratch)
    server = make_server(state)
    serving = asyncio.ensure_future(server.serve(sockets=[agents.dup()]))
    await state.changed.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while len(state.answered) < slots:
                state.changed.clear()
                await state.changed.wait()
    server.should_exit = True
    await serving
    best = max((copy for copy in state.replicas if _is_of(copy.path, created)), default=None)
    if best is not None:
        with best.path.open("rb") as file:
            os.fsync(file.fileno())
        # until a node has a replica of it, this controller's log is lost with it (control/log_replication.py)
        folder.log_unreplicated.touch()
        best.path.rename(folder.events)
    shutil.rmtree(scratch)
    return _lost(folder, slots) if best is None else _restored(folder, best)


def _is_of(path: Path, created: RunCreated) -> bool:
    """Whether a log is this run's."""
    first = next(iter(read_events(path)), None)
    return isinstance(first, RunCreated) and first.run == created.run


def _restored(folder: RunDir, best: _LogReplica) -> Finding:
    return Finding(
        code="event-log-restored",
        severity=Severity.INFO,
        what=f"the event log was lost with the controller's machine; the run resumes from node{best.node}'s copy",
        where=str(folder.events),
        evidence=(f"{best.bytes:,} bytes, written by {best.incarnations} controllers",),
        remedy="Nothing. A target with a volume keeps the log and what ranks write.",
        owner=Owner.CLUSTER,
    )


def _lost(folder: RunDir, slots: int) -> Finding:
    return Finding(
        code="event-log-lost",
        severity=Severity.WARNING,
        what="the event log was lost with the controller's machine, and no node has a copy: the run begins anew",
        where=str(folder.events),
        evidence=(f"none of {slots} nodes had one",),
        remedy="Name a volume in the target: the log and the count of restarts then outlive every pod.",
        owner=Owner.CLUSTER,
    )
