"""Connects to a run's controller: over its Unix socket on this machine, over TLS if it is on another."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import httpx
from msgspec import Struct

from holdfast.protocol import routes
from holdfast.run_dir import RunDir
from holdfast.security.tls import CONTROLLER_NAME, client_context


class ControllerHttp(Struct, frozen=True, kw_only=True):
    """A client of one controller."""

    client: httpx.Client
    is_here: bool

    def clock(self) -> float:
        """Monotonic seconds of the controller's machine, no later than now; infinite if it refuses to say them."""
        if self.is_here:
            return time.monotonic()
        answer = self.client.get(routes.CLOCK, extensions=_NAME)
        return float(answer.text) if answer.is_success else math.inf

    def post(self, path: str, content: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """Send a request."""
        return self.client.post(path, content=content, headers=headers, extensions=_NAME)


_NAME = {"sni_hostname": CONTROLLER_NAME}
"""The certificate names the controller, whatever its address."""


@contextmanager
def open_controller(run: RunDir, token: str, *, timeout_s: float) -> Generator[ControllerHttp]:
    """A client of a run's controller; raises OSError or httpx.TransportError if none is known or answers."""
    headers = {"Authorization": f"Bearer {token}"}
    if found := elsewhere(run):
        url, context = f"https://{found[0]}:{found[1]}", client_context(run.ca)
        with httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False, verify=context) as client:
            yield ControllerHttp(client=client, is_here=False)
        return
    directory = os.open(run.path, os.O_PATH | os.O_DIRECTORY)
    try:
        # Through /proc the path stays short however deep the folder lies; a Unix socket path has at most 107 bytes.
        path = f"/proc/self/fd/{directory}/{run.control_socket.name}"
        transport = httpx.HTTPTransport(uds=path, verify=client_context(ca=None))
        with httpx.Client(
            transport=transport, base_url="http://controller", headers=headers, timeout=timeout_s
        ) as client:
            yield ControllerHttp(client=client, is_here=True)
    finally:
        os.close(directory)


def elsewhere(run: RunDir) -> tuple[str, int] | None:
    """Host and port of a controller on another machine that shares the run's folder; None if it is here.

    A controller whose port has no certificate listens on its own machine's loopback only.
    """
    found = run.read_controller_record()
    if found.get("hostname", socket.gethostname()) == socket.gethostname() or not run.ca.exists():
        return None
    return (found["host"], found["port"]) if {"host", "port"} <= found.keys() else None
