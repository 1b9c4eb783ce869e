"""Owns since when a run's cluster is not heard here, and why: its mirror writes it, whoever shows the run reads it."""

from __future__ import annotations

import time

import msgspec

from holdfast.host.files import atomic_write, read_small
from holdfast.run_dir import RunDir


class LostContact(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that says nothing of a run."""

    since: float
    """Unix seconds when it was heard last."""
    reason: str
    remedy: str = ""
    """What somebody here can do about it, where there is something."""
    namespace_deleted_since: str = ""
    """Since when the run's namespace is being deleted, where it is: it says nothing any more."""


def lost_contact(folder: RunDir) -> LostContact | None:
    """Why the run's folder is behind; None where it is not."""
    try:
        return msgspec.json.decode(read_small(folder.cluster_contact), type=LostContact)
    except (OSError, msgspec.MsgspecError):
        return None


class ClusterContact:
    """What a mirror hears, kept in the run's folder as far as others must know it."""

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder
        known = lost_contact(folder)
        self._last_contact = known.since if known else _last_change(folder)

    def on_contact(self) -> None:
        """The cluster has just told how the run is."""
        self._last_contact = time.time()
        self._folder.cluster_contact.unlink(missing_ok=True)

    def on_contact_lost(self, reason: str, remedy: str = "", *, namespace_deleted_since: str = "") -> None:
        """It has not, for this reason."""
        silent = LostContact(
            since=self._last_contact, reason=reason, remedy=remedy, namespace_deleted_since=namespace_deleted_since
        )
        atomic_write(self._folder.cluster_contact, msgspec.json.encode(silent))


def _last_change(folder: RunDir) -> float:
    """When something was heard last, before this mirror: the log's last change, or the run's start."""
    return (folder.events if folder.events.exists() else folder.job).stat().st_mtime
