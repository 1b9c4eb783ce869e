"""What only a run's live controller knows of it, and its event log does not have."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class LogLag(Struct, frozen=True, kw_only=True):
    """How far the event log is behind what the controller knows, in seconds; 0 if it is not."""

    unwritten_s: float = 0.0
    """Age of the oldest event that the controller holds and has not written."""
    unreplicated_s: float | None = None
    """Age of the oldest lines that no node has been sent; None if the log is not replicated."""


class LiveReadings(Struct, frozen=True, kw_only=True):
    """Readings of one moment."""

    log_lag: LogLag = LogLag()
    nodes: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    """By node, what its monitors read: the numbers of watch/node_values.py."""
