"""A server for the metrics of runs that have no controller, or whose controller nothing scrapes."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.host.files import read_line
from holdfast.observe.metrics_endpoint import MetricsEndpoint
from holdfast.protocol import routes


def read_token(path: Path) -> str:
    """The token in a file; raises HoldfastError if there is none."""
    try:
        token = read_line(path)
    except OSError as error:
        raise _no_token(path, error.strerror or str(error)) from error
    if not token:
        raise _no_token(path, "it is empty")
    return token


def _no_token(path: Path, reason: str) -> HoldfastError:
    remedy = "Write a long random line to it, and give the same to the scraper."
    what = f"no token can be read from this file: {reason}"
    return failure("token-unreadable", what, exit_code=ExitCode.USAGE, where=str(path), remedy=remedy)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises HoldfastError if there is none to have. Port 0 is any free one."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise failure(
            "port-unavailable",
            f"holdfast cannot listen at port {port} of {host}",
            exit_code=ExitCode.UNAVAILABLE,
            evidence=(error.strerror or str(error),),
            remedy="Choose another with --port; 0 takes any free one.",
        ) from error


def url_of(listener: socket.socket) -> str:
    """The URL that a scraper needs."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{routes.METRICS}"


def serve_metrics(listener: socket.socket, logs: Callable[[], Mapping[str, Path]], *, token: str = "") -> None:
    """Answer scrapes on a listening socket until the process is interrupted.

    `logs` returns the paths of the event logs by run. With `token`, a scraper must send it as its bearer token.
    """
    endpoint = MetricsEndpoint(logs)

    async def answer(request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return PlainTextResponse("refused\n", status_code=401, headers={"WWW-Authenticate": "Bearer"})
        return await endpoint.answer(request)

    app = Starlette(routes=[Route(routes.METRICS, answer)])
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, server_header=False, ws="none")
    uvicorn.Server(config).run(sockets=[listener])
