"""HTTP routes of the controller's port."""

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
QUORUM = "/v1/quorum"
"""A WebSocket that carries one connection of a rank to the quorum service, byte by byte."""
BOOTSTRAP = "/v1/bootstrap"
CODE = "/v1/code/"
"""Followed by the digest of the requested code."""
UPLOADS = "/v1/uploads/"
"""Followed by the name of the uploaded file."""

TRACES = "/v1/traces/"
"""Followed by the name of the trace in the run's folder of traces."""

CLOCK = "/v1/clock"
"""Monotonic seconds of the controller's machine: a client elsewhere says by them when its request expires."""
METRICS = "/metrics"
"""Where Prometheus looks by default."""

REQUEST_ROUTES: dict[type[RequestEvent], str] = {
    CancelRequested: "/v1/cancel",
    FaultRequested: "/v1/drill",
    CheckpointRequested: "/v1/checkpoint",
    ProfileRequested: "/v1/profile",
    StackDumpRequested: "/v1/stack-dump",
    UpdateRequested: "/v1/update",
}
"""User requests, by event type."""


def http_url(agent: str, path: str) -> str:
    """The HTTP URL of a controller's path, given the URL of its agent WebSocket."""
    parts = urlsplit(agent)
    return parts._replace(scheme=parts.scheme.replace("ws", "http"), path=path).geturl()
