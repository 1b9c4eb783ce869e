"""HTTP client for helper processes of an agent: its token, and the controller's TLS identity.

The agent itself needs no HTTP client, so it does not import this module.
"""

from __future__ import annotations

from pathlib import Path

import httpx

from holdfast.security.tls import CONTROLLER_NAME, client_context

CONNECT_TIMEOUT_S = 3.0
"""Connect timeout in seconds: the address of a deleted pod does not refuse connections."""

SNI_EXTENSION = {"sni_hostname": CONTROLLER_NAME}
"""Extension for each request: the certificate names the controller, whatever its address."""


def make_client(
    token: str, ca: Path | None, *, read_timeout_s: float, connect_timeout_s: float = CONNECT_TIMEOUT_S
) -> httpx.Client:
    """Make a client that sends the token; the controller may be silent for `read_timeout_s` seconds."""
    return httpx.Client(
        headers={"Authorization": f"Bearer {token}"},
        timeout=httpx.Timeout(read_timeout_s, connect=connect_timeout_s),
        trust_env=False,
        verify=client_context(ca),
    )
