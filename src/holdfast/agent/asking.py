"""Owns how processes beside an agent ask the controller over HTTP: with whose token, and whom they take for it.

An agent carries no HTTP client, so it does not import this.
"""

from __future__ import annotations

from pathlib import Path

import httpx

from holdfast.guard.tls import NAME, agents_end

DIAL_S = 3.0
"""Longest that a connection takes: where a pod was that is gone, nobody refuses one."""

SNI = {"sni_hostname": NAME}
"""Of each request: the controller is known by its certificate, wherever it is."""


def client(token: str, ca: Path | None, *, answer_s: float, dial_s: float = DIAL_S) -> httpx.Client:
    """Asks in the name of a token's holder; a controller that is asked may be silent for `answer_s` seconds."""
    return httpx.Client(
        headers={"Authorization": f"Bearer {token}"},
        timeout=httpx.Timeout(answer_s, connect=dial_s),
        trust_env=False,
        verify=True if ca is None else agents_end(ca),
    )
