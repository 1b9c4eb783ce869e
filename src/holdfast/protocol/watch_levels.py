"""How what is detected in a rank is treated: `watch` of the job, as ranks receive it."""

from __future__ import annotations

from enum import StrEnum


class WatchLevel(StrEnum):
    """What happens when something is detected in ranks that still run."""

    OFF = "off"
    """It is not looked for."""
    WARN = "warn"
    """A finding; the run continues."""
    ACT = "act"
    """The policy decides: ranks stop, and restart on checked nodes or on other ones."""
