"""The kubelet's HTTP server: logs, exec, port-forward, the list of pods. It serves only the API server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from lab.kubelet import logs
from lab.kubelet.container import Container
from lab.kubelet.exec import execute
from lab.kubelet.logs import LogOptions
from lab.kubelet.pod import LabPod
from lab.kubelet.portforward import forward

Find = Callable[[str, str], LabPod | None]
"""A pod by its namespace and name."""


def application(find: Find) -> Starlette:
    """The routes of the server."""

    def container(connection: Request | WebSocket) -> Container | None:
        where = connection.path_params
        pod = find(where["namespace"], where["pod"])
        named = (one for one in pod.containers if one.name == where["container"]) if pod else ()
        return next(iter(named), None)

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    async def get_logs(request: Request) -> Response:
        found = container(request)
        query = request.query_params
        previous = query.get("previous") == "true"
        if found is None or not found.log(previous=previous).exists():
            which = "previous terminated " if previous else ""
            return PlainTextResponse(f"{which}container has no log\n", status_code=400 if previous else 404)
        since = logs.ago(int(query["sinceSeconds"])) if "sinceSeconds" in query else query.get("sinceTime")
        options = LogOptions(
            follow=query.get("follow") == "true",
            timestamps=query.get("timestamps") == "true",
            tail=int(query["tailLines"]) if "tailLines" in query else None,
            since=since,
            limit_bytes=int(query["limitBytes"]) if "limitBytes" in query else None,
        )
        start = found.state.restarts

        def runs() -> bool:
            return found.state.running and found.state.restarts == start

        lines = logs.read_log(found.log(previous=previous), options, is_running=runs)
        return StreamingResponse(lines, media_type="text/plain")

    async def run(socket: WebSocket) -> None:
        query = socket.query_params
        await execute(socket, container(socket), query.getlist("command"), tty=query.get("tty") in ("true", "1"))

    async def forward_port(socket: WebSocket) -> None:
        pod = find(socket.path_params["namespace"], socket.path_params["pod"])
        if pod is None or pod.sandbox is None:
            await socket.close()
            return
        await forward(socket, pod.sandbox.probe_prefix, int(socket.query_params["port"]))

    suffix = "{namespace}/{pod}/{container}"
    return Starlette(
        routes=[
            Route("/healthz", health),
            Route(f"/containerLogs/{suffix}", get_logs),
            WebSocketRoute(f"/exec/{suffix}", run),
            WebSocketRoute("/portForward/{namespace}/{pod}", forward_port),
        ]
    )


async def serve(find: Find, socket: Path, pki: Path) -> None:
    """Serve on a Unix socket, to clients with a certificate of the lab's authority."""
    configuration = uvicorn.Config(
        application(find),
        uds=str(socket),
        log_level="warning",
        lifespan="off",
        ws_ping_interval=None,
        ssl_certfile=pki / "tls.crt",
        ssl_keyfile=pki / "tls.key",
        ssl_ca_certs=str(pki / "ca.crt"),
        ssl_cert_reqs=ssl.CERT_REQUIRED,
    )
    server = uvicorn.Server(configuration)
    try:
        await server.serve()
    except asyncio.CancelledError:
        server.should_exit = True
        raise
