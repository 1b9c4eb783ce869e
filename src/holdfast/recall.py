"""Owns getting a run's log and code back from the copies that its nodes keep, for a controller in an empty folder.

A copy counts as far as the controller that was had vouched for it (control/copies.py). Of those that do, the one counts
that most controllers have written to, then the longest: what another has beyond it is of a life that ended before.
Refuses to own whether there was an earlier life at all (the place knows that).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from holdfast.events import ControllerStarted, RunCreated, paths
from holdfast.events.agent import LOG_NAME, LOG_SEAL, LOG_WANTED
from holdfast.events.log import read_events
from holdfast.findings import Fault, Finding, Severity
from holdfast.folder import RunFolder
from holdfast.guard.door import Server
from holdfast.guard.keys import Keys, Newcomer, NodeAgent
from holdfast.guard.limits import LIMITS
from holdfast.launch.code.archive import archive_path

log = logging.getLogger("holdfast.controller")

LATER = 503
"""What an agent is answered whose copy is here."""
_COPY = re.compile(re.escape(LOG_NAME) + r"|[0-9a-f]{64}")


@dataclass(frozen=True, order=True)
class _Copy:
    """A copy that was vouched for, by what makes one count."""

    lives: int
    bytes: int
    node: int
    path: Path


class _Recall:
    """What nodes have said of the run so far, and the port at which they say it."""

    def __init__(self, folder: RunFolder, keys: Keys, scratch: Path) -> None:
        self._folder = folder
        self._keys = keys
        self._scratch = scratch
        self.heard: set[int] = set()
        """Slots whose node has given what it had, or is new and has nothing."""
        self.copies: list[_Copy] = []
        self.news = asyncio.Event()
        self._routes = Starlette(
            routes=[
                WebSocketRoute(paths.AGENT, self._agent),
                Route(paths.ENROL, self._enrol, methods=["POST"]),
                Route(paths.COPIES + "{name}", self._take, methods=["PUT"]),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        holder = self._keys.holder_of(HTTPConnection(scope).headers.get("authorization", ""))
        if isinstance(holder, Newcomer if scope["path"] == paths.ENROL else NodeAgent):
            scope["holder"] = holder
            await self._routes(scope, receive, send)
        elif scope["type"] == "http":
            await JSONResponse({"error": "refused"}, status_code=401)(scope, receive, send)
        else:
            await WebSocket(scope, receive, send).close(code=1008)

    async def _agent(self, websocket: WebSocket) -> None:
        holder: NodeAgent = websocket.scope["holder"]
        status = LATER if holder.node in self.heard else LOG_WANTED
        await websocket.send_denial_response(JSONResponse({"error": "the run's log is recalled"}, status_code=status))

    async def _enrol(self, request: Request) -> Response:
        holder: Newcomer = request.scope["holder"]
        self._hear(holder.node)
        return JSONResponse({"error": "it is not known yet who you are"}, status_code=404)

    async def _take(self, request: Request) -> Response:
        """Take one file of a node's: the log where it is vouched for, code where it is what its name says."""
        holder: NodeAgent = request.scope["holder"]
        name: str = request.path_params["name"]
        if not _COPY.fullmatch(name):
            return JSONResponse({"error": "no such thing is kept"}, status_code=404)
        request.state.arrival.settle(LIMITS.download_s)
        part = self._scratch / f"node{holder.node}-{name}"
        digest = hashlib.sha256()
        with part.open("wb") as file:
            async for data in request.stream():
                digest.update(data)
                file.write(data)
        if name == LOG_NAME:
            seal = self._keys.of_log(digest.digest())
            if hmac.compare_digest(seal, request.headers.get(LOG_SEAL, "")):
                lives = sum(isinstance(event, ControllerStarted) for event in read_events(part))
                self.copies.append(_Copy(lives=lives, bytes=part.stat().st_size, node=holder.node, path=part))
            self._hear(holder.node)
        elif digest.hexdigest() == name:
            place = archive_path(self._folder.code, name)
            place.parent.mkdir(mode=0o700, exist_ok=True)
            part.rename(place)
        return JSONResponse({"ok": True})

    def _hear(self, node: int) -> None:
        self.heard.add(node)
        self.news.set()


async def recall(
    folder: RunFolder,
    created: RunCreated,
    keys: Keys,
    agents: socket.socket,
    listening: Callable[[ASGIApp], Server],
    *,
    slots: int,
    grace_s: float,
) -> Finding:
    """Wait for the nodes, and put the log in its place that one of them has; what is to be said of it.

    It is over when each slot's node was heard, or `grace_s` after the first: who is silent for longer counts as lost.
    """
    scratch = folder.recalled
    scratch.mkdir(mode=0o700, exist_ok=True)
    state = _Recall(folder, keys, scratch)
    server = listening(state)
    serving = asyncio.ensure_future(server.serve(sockets=[agents.dup()]))
    await state.news.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while len(state.heard) < slots:
                state.news.clear()
                await state.news.wait()
    server.should_exit = True
    await serving
    best = max((copy for copy in state.copies if _is_of(copy.path, created)), default=None)
    if best is not None:
        with best.path.open("rb") as file:
            os.fsync(file.fileno())
        folder.untold.touch()  # what this life adds to it is lost with it until a node knows (control/copies.py)
        best.path.rename(folder.events)
    shutil.rmtree(scratch)
    return _lost(folder, slots) if best is None else _recalled(folder, best)


def _is_of(path: Path, created: RunCreated) -> bool:
    """Whether a log is this run's."""
    first = next(iter(read_events(path)), None)
    return isinstance(first, RunCreated) and first.run == created.run


def _recalled(folder: RunFolder, best: _Copy) -> Finding:
    return Finding(
        code="event-log-recalled",
        severity=Severity.INFO,
        what=f"the event log was lost with the controller's machine; the run goes on from node{best.node}'s copy",
        where=str(folder.events),
        evidence=(f"{best.bytes:,} bytes, written by {best.lives} controllers",),
        remedy="Nothing. A profile with a volume keeps the log and what ranks write.",
        fault=Fault.CLUSTER,
    )


def _lost(folder: RunFolder, slots: int) -> Finding:
    return Finding(
        code="event-log-lost",
        severity=Severity.WARNING,
        what="the event log was lost with the controller's machine, and no node has a copy: the run begins anew",
        where=str(folder.events),
        evidence=(f"none of {slots} nodes had one",),
        remedy="Name a volume in the profile: the log and the count of restarts then outlive every pod.",
        fault=Fault.CLUSTER,
    )
