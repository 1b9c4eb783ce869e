"""The controller's process: puts the machine, the back end and the port together for one run.

`python -m holdfast.server RUN_FOLDER AGENTS_FD CLIENTS_FD KEEPER_FD`, started by a keeper that holds the two listening
sockets, and to whose pipe it beats.
One application answers on both: agents come in over TCP, this user's commands over the Unix socket; each shows a
token that allows what it asks, and without one nothing answers but the refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

import holdfast
from holdfast.clock import Clock
from holdfast.control.commands import Start
from holdfast.control.controller import Controller, NotItsOwn
from holdfast.control.machine import Machine
from holdfast.control.state import NodeState
from holdfast.control.takeover import take_over
from holdfast.errors import ExitCode
from holdfast.events import (
    AgentJoined,
    CancelRequested,
    CheckpointRequested,
    CodeShipped,
    DrillRequested,
    DrillTarget,
    FindingRaised,
    OperatorEvent,
    RunCreated,
    RunFinished,
    SplitRequested,
)
from holdfast.events.bounds import Decoder
from holdfast.events.log import EventReader, EventWriter, is_whole, last_event
from holdfast.events.operator import UNTIL
from holdfast.events.orders import (
    PROTOCOL,
    Order,
    StartRanks,
    agent_message_decoder,
    encode,
    messages,
    progress_interval_s,
)
from holdfast.findings import Fault, Finding, Severity
from holdfast.folder import RunFolder
from holdfast.guard.door import AgentsWebSocket, Arrival, Server
from holdfast.guard.keys import Holder, Keys, Newcomer, NodeAgent, Operator
from holdfast.guard.limits import LIMITS, Bucket, Limits
from holdfast.guard.sparing import Sparing
from holdfast.guard.tls import controllers_end, leaves_the_machine, make_identity
from holdfast.host.limits import open_more_files
from holdfast.job.accepted import Accepted
from holdfast.job.backend import Backend
from holdfast.job.profile import KUBERNETES
from holdfast.job.silence import Silence
from holdfast.job.spec import Job
from holdfast.launch.code.archive import archive_path
from holdfast.launch.environment import Attempt, Share, checkpoints_folder
from holdfast.launch.launchers import Plan, launches
from holdfast.launch.local.backend import LocalBackend
from holdfast.launch.local.drills import OutsideDrills
from holdfast.launch.local.isolation import isolation_for
from holdfast.launch.local.share import shares
from holdfast.quorum.keeping import QuorumKeeper

log = logging.getLogger("holdfast.controller")

GARBAGE_OBJECTS = 100_000
"""New objects after which the interpreter looks for garbage. With its own 700 a controller of 2,048 agents spends a
fifth of a restart on looking through a million objects that live as long as it does."""

BEAT_S = 1.0
"""Seconds between signs of life to the keeper, which takes fifteen without one for an end (launch/local/keeper.py)."""


_GONE = (WebSocketDisconnect, WebSocketDisconnected)
"""The other end has closed the connection, or we had."""


class _Peer:
    """One agent's WebSocket; orders go out in the order in which they were given."""

    def __init__(self, websocket: WebSocket, arrival: Arrival, backlog: int) -> None:
        self._websocket = websocket
        self._arrival = arrival
        self._orders: asyncio.Queue[bytes | None] = asyncio.Queue(backlog)

    def send(self, order: Order) -> None:
        self._put(encode(order))

    def close(self, reason: str) -> None:
        self._put(None)

    def _put(self, order: bytes | None) -> None:
        """An agent that does not read is cut off: it is told all it has missed when it joins again."""
        try:
            self._orders.put_nowait(order)
        except asyncio.QueueFull:
            log.warning("an agent has not read its last %s orders; it is cut off", self._orders.maxsize)
            self._arrival.cut()

    async def pump(self) -> None:
        """Send what is queued until the connection is closed from either side."""
        while (order := await self._orders.get()) is not None:
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
_AGENT_PATH = "/v1/agent"
_ENROL_PATH = "/v1/enrol"


class Port:
    """The controller's one port: for agents their WebSocket and the code, for the operator commands; each by token."""

    def __init__(
        self,
        controller: Controller,
        keys: Keys,
        code: Path | None = None,
        limits: Limits = LIMITS,
        generation: Callable[[int, str], int | None] = lambda _node, _address: None,
    ) -> None:
        self._controller = controller
        self._generation = generation
        self._keys = keys
        self._limits = limits
        self._buckets: dict[NodeAgent, Bucket] = {}
        code_path = f"/v1/code/{code.stem}" if code else ""
        self._holders = {_AGENT_PATH: NodeAgent, code_path: NodeAgent, _ENROL_PATH: Newcomer}
        """Whose token each path takes; everything else takes the operator's."""
        self._routes = Starlette(
            routes=[
                WebSocketRoute(_AGENT_PATH, self._agent),
                *([Route(code_path, self._serving(code))] if code else []),
                Route(_ENROL_PATH, self._enrol, methods=["POST"]),
                Route("/v1/cancel", self._taking(CancelRequested), methods=["POST"]),
                Route("/v1/drill", self._taking(DrillRequested), methods=["POST"]),
                Route("/v1/checkpoint", self._taking(CheckpointRequested), methods=["POST"]),
                Route("/v1/split", self._taking(SplitRequested), methods=["POST"]),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a connection whose token allows what it asks; refuse any other before it learns what there is."""
        connection = HTTPConnection(scope)
        holder = self._holder(connection)
        # Not `connection.url`: the sender's Host header is a part of that.
        path: str = scope["path"]
        if isinstance(holder, self._holders.get(path, Operator)):
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

    def _holder(self, connection: HTTPConnection) -> Holder | None:
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        return self._keys.holder(token) if scheme.lower() == "bearer" else None

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
                _give_way(error)
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
        return JSONResponse({"generation": generation, "token": token})

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
            _give_way(error)
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

    def _serving(self, archive: Path) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that gives out the run's code."""

        async def endpoint(request: Request) -> Response:
            if not archive.is_file():
                return JSONResponse({"error": "the archive is gone"}, status_code=410)
            arrival: Arrival = request.state.arrival
            arrival.settle(self._limits.download_s)
            return FileResponse(archive, media_type="application/x-tar")

        return endpoint


def _until(request: Request) -> float:
    """Until when a request may be obeyed, in this machine's monotonic seconds; raises MsgspecError for nonsense."""
    return msgspec.json.decode(request.headers.get(UNTIL, "1e300"), type=float)


def _give_way(error: BaseException) -> NoReturn:
    """What the machine holds to be impossible must not go unseen: another controller starts from the log."""
    log.critical("the controller failed and will be restarted from its log", exc_info=error)
    os._exit(ExitCode.INTERNAL)


async def _close(websocket: WebSocket) -> None:
    """Close a connection that does not keep to the protocol; it may be closed already."""
    with contextlib.suppress(*_GONE):
        await websocket.close(code=1002)


def listening(
    port: Port, *, nodes: int, silence: Silence, limits: Limits = LIMITS, tls: ssl.SSLContext | None = None
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


def _tls(folder: RunFolder, host: str) -> ssl.SSLContext | None:
    """TLS where agents come over a network, under the identity that an earlier controller of the run made."""
    if not leaves_the_machine(host):
        return None
    if not folder.identity.exists():
        make_identity(folder.ca, folder.identity)
    return controllers_end(folder.identity)


def _place(name: str) -> tuple[Callable[..., Backend], Callable[[Job, Mapping[str, str]], tuple[Share, ...]]]:
    """The back end of this name, and what a node of it may use of its machine; imported when it is used."""
    if name == KUBERNETES:
        from holdfast.launch.kubernetes.backend import KubernetesBackend, own_machines

        return KubernetesBackend, own_machines
    return LocalBackend, shares


def _shipped(accepted: Accepted) -> tuple[CodeShipped, ...]:
    """What the log says of the code right after the run's creation; nothing where ranks run in place."""
    code = accepted.code
    if code is None:
        return ()
    return (CodeShipped(at=accepted.created_at, digest=code.digest, bytes=code.bytes, files=code.files),)


def _port_taken(folder: RunFolder) -> tuple[Finding, ...]:
    """What is to be said, once, when an earlier keeper's port could not be had again."""
    found = json.loads(folder.controller.read_text())
    if "taken_by" not in found:
        return ()
    taken = Finding(
        code="controller-port-taken",
        severity=Severity.WARNING,
        what=f"port {found['former_port']}, where the run's controller was, is taken; it is at {found['port']} now",
        where=f"{found['host']}:{found['former_port']}",
        evidence=(f"{found['taken_by']} has it",),
        remedy="Nothing: agents look up where the controller is before they connect.",
        fault=Fault.CLUSTER,
    )
    told = (event.finding for event in EventReader(folder.events).read() if isinstance(event, FindingRaised))
    return () if taken in told else (taken,)


def _quorum(folder: RunFolder, job: Job, host: str) -> QuorumKeeper | None:
    """What decides which replicas step together, where there are several."""
    recovery = job.recovery
    if recovery.replicas == 1:
        return None
    grace_s = recovery.controller_grace_s
    return QuorumKeeper(folder.path, host=host, min_replicas=recovery.min_replicas, grace_s=grace_s)


async def _beat(keeper: int) -> None:
    """Show the keeper, which holds the other end of this pipe, that the controller gets on with its work."""
    os.set_blocking(keeper, False)
    while True:
        with contextlib.suppress(OSError):  # the keeper is gone, or stopped
            os.write(keeper, b".")
        await asyncio.sleep(BEAT_S)


async def serve(
    folder: RunFolder,
    agents: socket.socket,
    clients: socket.socket,
    keeper: int,
    *,
    place: Callable[..., Backend] | None = None,
) -> None:
    """Run a folder's job from where its log stands to its end; `keeper` is the pipe that takes our beat.

    `place` makes the back end in place of the one that the run was accepted for.
    """
    if isinstance(last_event(folder.events), RunFinished):
        folder.forget_secrets()
        return
    gc.set_threshold(GARBAGE_OBJECTS)
    beat = asyncio.ensure_future(_beat(keeper))
    accepted = Accepted.model_validate_json(folder.job.read_text())
    private = json.loads(folder.secrets.read_text())
    host, number = agents.getsockname()[:2]
    tls = _tls(folder, host)
    writer = EventWriter(folder.events)
    isolation = isolation_for(accepted.isolation, folder.run)
    begun = folder.events.stat().st_size > 0
    made_by, shared_by = _place(accepted.backend)
    backend = (place or made_by)(
        folder=folder,
        accepted=accepted,
        isolation=isolation,
        url=f"{'wss' if tls else 'ws'}://{host}:{number}/v1/agent",
    )
    share = shared_by(accepted.job, os.environ)
    machine = Machine(accepted.job)
    created = RunCreated(
        at=accepted.created_at,
        run=folder.run,
        job=accepted.job.model_dump(mode="json", exclude_defaults=True),
        version=holdfast.__version__,
    )
    history, news = EventReader(folder.events).read(), () if begun else (created, *_shipped(accepted))
    if not is_whole(folder.events):
        taken = take_over(machine, EventReader(folder.events).entries(), created, str(folder.events))
        history, news = taken.events, taken.news(Clock(not_before=max(event.at for event in taken.events))())
        log.error("%s", taken.finding)
        if taken.broken:
            await backend.cancel()
            writer.append(news, sync=True)
            return

    keys = Keys(folder.token.read_text().strip())
    quorum = _quorum(folder, accepted.job, host)
    keeping = asyncio.ensure_future(quorum.run()) if quorum else None

    def start_orders(start: Start, members: tuple[NodeState, ...]) -> Callable[[int], StartRanks]:
        attempt = Attempt(
            replica=start.replica,
            replica_count=accepted.job.recovery.replicas,
            attempt=start.attempt,
            nodes=tuple(member.node for member in members),
            master_addr=start.master_addr,
            master_port=str(start.master_port),
            doors=tuple(f"{member.address}:{member.port}" for member in members),
            key=keys.of_attempt(start.replica, start.attempt),
            lighthouse=quorum.url if quorum else "",
        )

        plan = Plan.of(accepted, folder, attempt, private["secrets"])

        def of_node(node: int) -> StartRanks:
            env, ranks = launches(plan, node, share[node])
            return StartRanks(
                replica=start.replica,
                attempt=start.attempt,
                ranks=ranks,
                env=env,
                progress_s=progress_interval_s(accepted.job.nodes.max),
                step_deadline_s=accepted.job.recovery.step_deadline_s,
                code=accepted.code.digest if accepted.code else "",
                log_max_bytes=accepted.job.logs.max_bytes,
            )

        return of_node

    checkpoints = checkpoints_folder(accepted, folder)
    folders = {DrillTarget.RUN_FOLDER: folder.path, DrillTarget.CHECKPOINTS: checkpoints}
    drills = OutsideDrills(isolation=isolation, folders=folders)
    controller = Controller(
        machine=machine,
        writer=writer,
        history=history,
        backend=backend,
        start_orders=start_orders,
        drill=drills,
        attend=quorum.tell if quorum else None,
        incarnation=secrets.token_hex(4),
    )
    controller.feed(*news)
    controller.tell(*_port_taken(folder))
    archive = archive_path(folder.code, accepted.code.digest) if accepted.code else None
    port = Port(controller, keys, archive, generation=backend.generation)
    silence = Silence(node_grace_s=accepted.job.recovery.node_grace_s)
    server = listening(port, nodes=accepted.job.nodes.max, silence=silence, tls=tls)
    serving = asyncio.ensure_future(server.serve(sockets=[agents, clients]))
    if quorum:
        await quorum.known()
    if not controller.finished:
        await controller.run()
    if quorum and keeping:
        keeping.cancel()
        await quorum.end()
    drills.clear()
    folder.forget_secrets()
    server.should_exit = True
    await serving
    beat.cancel()
    writer.close()


def main() -> None:
    """Serve the run folder named on the command line, on the sockets and the pipe that were handed down."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    open_more_files()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(Sparing(LIMITS.log_lines_a_minute))
    folder, *handed_down = sys.argv[1:]
    agents, clients, keeper = map(int, handed_down)
    asyncio.run(serve(RunFolder(Path(folder)), socket.socket(fileno=agents), socket.socket(fileno=clients), keeper))


if __name__ == "__main__":
    main()
