"""Owns where the controller's one port takes what."""

from __future__ import annotations

from holdfast.events import (
    CancelRequested,
    CheckpointRequested,
    DrillRequested,
    OperatorEvent,
    SplitRequested,
    UpdateRequested,
)

REQUESTS: dict[type[OperatorEvent], str] = {
    CancelRequested: "/v1/cancel",
    DrillRequested: "/v1/drill",
    CheckpointRequested: "/v1/checkpoint",
    SplitRequested: "/v1/split",
    UpdateRequested: "/v1/update",
}
"""Of its operator, by what is asked for."""
