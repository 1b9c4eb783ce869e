"""Owns where the controller's one port takes what."""

from __future__ import annotations

from urllib.parse import urlsplit

from holdfast.events import (
    CancelRequested,
    CheckpointRequested,
    FaultRequested,
    ProfileRequested,
    RequestEvent,
    StackDumpRequested,
    UpdateRequested,
)

AGENT_SOCKET = "/v1/agent"
"""The WebSocket of a node's agent."""
BOOTSTRAP = "/v1/bootstrap"
CODE = "/v1/code/"
"""With the digest of what is asked for."""
UPLOADS = "/v1/uploads/"
"""With the name of what is given back."""

REQUEST_ROUTES: dict[type[RequestEvent], str] = {
    CancelRequested: "/v1/cancel",
    FaultRequested: "/v1/drill",
    CheckpointRequested: "/v1/checkpoint",
    ProfileRequested: "/v1/profile",
    StackDumpRequested: "/v1/stack-dump",
    UpdateRequested: "/v1/update",
}
"""Of its operator, by what is asked for."""


def http_url(agent: str, path: str) -> str:
    """What a controller takes at a path, where agents reach its WebSocket at the URL `agent`."""
    parts = urlsplit(agent)
    return parts._replace(scheme=parts.scheme.replace("ws", "http"), path=path).geturl()
