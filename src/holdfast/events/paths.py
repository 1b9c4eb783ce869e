"""Owns where the controller's one port takes what."""

from __future__ import annotations

from urllib.parse import urlsplit

from holdfast.events import (
    CancelRequested,
    CheckpointRequested,
    DrillRequested,
    OperatorEvent,
    SplitRequested,
    StacksRequested,
    UpdateRequested,
)

AGENT = "/v1/agent"
"""The WebSocket of a node's agent."""
ENROL = "/v1/enrol"
CODE = "/v1/code/"
"""With the digest of what is asked for."""
COPIES = "/v1/copies/"
"""With the name of what is given back."""

REQUESTS: dict[type[OperatorEvent], str] = {
    CancelRequested: "/v1/cancel",
    DrillRequested: "/v1/drill",
    CheckpointRequested: "/v1/checkpoint",
    SplitRequested: "/v1/split",
    StacksRequested: "/v1/stacks",
    UpdateRequested: "/v1/update",
}
"""Of its operator, by what is asked for."""


def url_of(agent: str, path: str) -> str:
    """What a controller takes at a path, where agents reach its WebSocket at the URL `agent`."""
    parts = urlsplit(agent)
    return parts._replace(scheme=parts.scheme.replace("ws", "http"), path=path).geturl()
