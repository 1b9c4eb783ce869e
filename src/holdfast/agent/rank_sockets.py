"""Creates the ranks' sockets of one attempt in a private folder."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.agent.rank_ipc import RankServer
from holdfast.findings import Finding, Owner, Severity
from holdfast.host.files import is_private

log = logging.getLogger("holdfast.agent")

FALLBACK_DIRS = ("$XDG_RUNTIME_DIR", "/dev/shm", "/tmp", "/run")
"""Parents of a randomly named folder, used when the given folder is missing, full, or not private."""


class RankSockets:
    """The sockets of one attempt, in `folder` if it is usable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._created: Path | None = None
        """A folder created here, to be removed."""

    async def open(self, servers: Mapping[str, RankServer]) -> tuple[str, ...]:
        """Open each server's socket under its name; return why that failed in all folders, or nothing."""
        refusals: list[str] = []
        for folder in self._candidates(refusals):
            try:
                for name, channel in servers.items():
                    await channel.open(folder / name)
            except OSError as error:
                refusals.append(f"{folder}: {error.strerror or error}")
                for channel in servers.values():
                    channel.close()
                self.clean_up()
                continue
            if refusals:
                log.warning("sockets of ranks are in %s, since elsewhere: %s", folder, "; ".join(refusals))
            self.folder = folder
            return ()
        return tuple(refusals)

    def clean_up(self) -> None:
        """Remove the folder, if it was created for this attempt."""
        if self._created is not None:
            shutil.rmtree(self._created, ignore_errors=True)
            self._created = None

    def _candidates(self, refusals: list[str]) -> Iterator[Path]:
        """Private folders, starting with the given one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _require_private(self.folder)
            yield self.folder
        except OSError as error:
            refusals.append(f"{self.folder}: {error.strerror or error}")
        for parent in map(os.path.expandvars, FALLBACK_DIRS):
            if not os.path.isdir(parent):
                continue
            try:
                self._created = Path(tempfile.mkdtemp(prefix="holdfast-", dir=parent))
            except OSError as error:
                refusals.append(f"{parent}: {error.strerror or error}")
                continue
            yield self._created


def _require_private(folder: Path) -> None:
    """Raise OSError unless the folder belongs to this user alone: another user may have created it first."""
    if not is_private(folder):
        found = folder.lstat()
        raise PermissionError(f"{stat.filemode(found.st_mode)} of user {found.st_uid} is no private folder of ours")


def rank_channel_missing(node: int, ranks: str, refusals: tuple[str, ...]) -> Finding:
    """The finding on ranks that have no socket to their agent."""
    return Finding(
        code="rank-channel-missing",
        severity=Severity.WARNING,
        what=f"rank {ranks} on node{node} cannot reach the agent: it trains, but its steps are not seen",
        where=f"node{node}",
        evidence=refusals[:8],
        remedy="Free space in the sockets' folder, or set XDG_RUNTIME_DIR to a private one; the next start of the "
        "ranks tries again. Until then hangs are not detected, and `holdfast checkpoint` does not reach them.",
        owner=Owner.CLUSTER,
    )
