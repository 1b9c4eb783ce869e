"""Owns how processes beside an agent ask the controller over HTTP: with whose token, and whom they take for it.

An agent carries no HTTP client, so it does not import this.
"""

from __future__ import annotations

from pathlib import Path

import httpx

from holdfast.security.tls import CONTROLLER_NAME, client_context

CONNECT_TIMEOUT_S = 3.0
"""Longest that a connection takes: where a pod was that is gone, nobody refuses one."""

SNI_EXTENSION = {"sni_hostname": CONTROLLER_NAME}
"""Of each request: the controller is known by its certificate, wherever it is."""


def make_client(
    token: str, ca: Path | None, *, read_timeout_s: float, connect_timeout_s: float = CONNECT_TIMEOUT_S
) -> httpx.Client:
    """Asks in the name of a token's holder; a controller that is asked may be silent for `answer_s` seconds."""
    return httpx.Client(
        headers={"Authorization": f"Bearer {token}"},
        timeout=httpx.Timeout(read_timeout_s, connect=connect_timeout_s),
        trust_env=False,
        verify=True if ca is None else client_context(ca),
    )
