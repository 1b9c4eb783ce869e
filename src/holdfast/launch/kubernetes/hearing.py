"""Owns since when a run's cluster is not heard here, and why: its mirror writes it, whoever shows the run reads it."""

from __future__ import annotations

import time

import msgspec

from holdfast.folder import RunFolder
from holdfast.host.files import put, read_small


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that says nothing of a run."""

    since: float
    """Unix seconds when it was heard last."""
    why: str
    remedy: str = ""
    """What somebody here can do about it, where there is something."""
    ends: str = ""
    """Since when the run's namespace is being deleted, where it is: it says nothing any more."""


def silence(folder: RunFolder) -> Silence | None:
    """Why the run's folder is behind; None where it is not."""
    try:
        return msgspec.json.decode(read_small(folder.silence), type=Silence)
    except (OSError, msgspec.MsgspecError):
        return None


class Ear:
    """What a mirror hears, kept in the run's folder as far as others must know it."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        known = silence(folder)
        self._heard_at = known.since if known else _changed(folder)

    def hears(self) -> None:
        """The cluster has just told how the run is."""
        self._heard_at = time.time()
        self._folder.silence.unlink(missing_ok=True)

    def hears_nothing(self, why: str, remedy: str = "", *, ends: str = "") -> None:
        """It has not, for this reason."""
        silent = Silence(since=self._heard_at, why=why, remedy=remedy, ends=ends)
        put(self._folder.silence, msgspec.json.encode(silent))


def _changed(folder: RunFolder) -> float:
    """When something was heard last, before this mirror: the log's last change, or the run's start."""
    return (folder.events if folder.events.exists() else folder.job).stat().st_mtime
