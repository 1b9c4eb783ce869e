"""Records since when and why a run's cluster is unreachable; the process that mirrors the run writes it.

`holdfast status` reads it.
"""

from __future__ import annotations

import time

import msgspec

from holdfast.findings import Finding
from holdfast.host.files import atomic_write, read_small
from holdfast.run_dir import RunDir


class LostContact(msgspec.Struct, frozen=True, kw_only=True):
    """Lost contact with a run's cluster."""

    since: float
    """Unix time of the last contact."""
    reason: str
    remedy: str = ""
    """What the user can do about it, if anything."""
    command: str
    """What shows the run without holdfast."""
    finding: Finding | None = None
    """Why the run cannot continue there, if that is known."""


def lost_contact(folder: RunDir) -> LostContact | None:
    """Why the run's folder is stale; None if it is not."""
    try:
        return msgspec.json.decode(read_small(folder.cluster_contact), type=LostContact)
    except (OSError, msgspec.MsgspecError):
        return None


class ClusterContact:
    """Stores in the run's folder whether its cluster is in contact; `command` shows the run without holdfast."""

    def __init__(self, folder: RunDir, command: str) -> None:
        self._folder, self._command = folder, command
        known = lost_contact(folder)
        self._last_contact = known.since if known else _last_change(folder)

    def on_contact(self) -> None:
        """The cluster has just reported the run's state."""
        self._last_contact = time.time()
        self._folder.cluster_contact.unlink(missing_ok=True)

    def on_contact_lost(self, reason: str, remedy: str = "", *, finding: Finding | None = None) -> None:
        """The cluster could not be reached, for this reason."""
        silent = LostContact(
            since=self._last_contact, reason=reason, remedy=remedy, command=self._command, finding=finding
        )
        atomic_write(self._folder.cluster_contact, msgspec.json.encode(silent))


def _last_change(folder: RunDir) -> float:
    """Time of the last contact before this process: the log's last change, or the run's start."""
    return (folder.events if folder.events.exists() else folder.job).stat().st_mtime
