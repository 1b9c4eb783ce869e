"""What only a run's live controller knows of it, and its event log does not have."""

from __future__ import annotations

from msgspec import Struct


class LogLag(Struct, frozen=True, kw_only=True):
    """How far the event log is behind what the controller knows, in seconds; 0 if it is not."""

    unwritten_s: float = 0.0
    """Age of the oldest event that the controller holds and has not written."""
    unreplicated_s: float | None = None
    """Age of the oldest lines that no node has been sent; None if the log is not replicated."""


class LiveReadings(Struct, frozen=True, kw_only=True):
    """Readings of one moment."""

    log_lag: LogLag = LogLag()
