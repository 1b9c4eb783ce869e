"""Owns a node's unpacked code: asks for what is missing (fetch.py does it) and says where it lies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import paths
from holdfast.findings import Fault, Finding
from holdfast.host.processes import die_with_parent

log = logging.getLogger("holdfast.agent")

AWAY = os.EX_TEMPFAIL
"""Exit code of fetch.py: the controller was out of reach all the while."""


class CodeFolder:
    """Folders of unpacked code by digest, filled from the controller.

    `where` tells where that is now, as the agent's WebSocket URL. The folder `copies` takes the archives, where those
    are to be kept.
    """

    def __init__(
        self, where: Callable[[], str], token: str, folder: Path, *, ca: Path | None = None, copies: Path | None = None
    ) -> None:
        self._where = where
        self._token = token
        self._folder = folder
        self._known_by = () if ca is None else ("--ca", str(ca))
        self._kept = () if copies is None else ("--copies", str(copies))

    async def get(self, digest: str) -> Path:
        """The unpacked code, pulled first where it is not there; raises HoldfastError when it cannot be had."""
        path = self._folder / digest
        while not path.is_dir() and not await self._fetch(digest):
            log.warning("the code cannot be pulled as long as the controller is out of reach")
        return path

    async def _fetch(self, digest: str) -> bool:
        """Have it pulled and unpacked; whether the controller was there to be asked."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "holdfast.agent.fetch",
            paths.url_of(self._where(), paths.CODE + digest),
            str(self._folder),
            *self._known_by,
            *self._kept,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        try:
            said, _ = await process.communicate(self._token.encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if process.returncode not in (0, AWAY):
            raise HoldfastError((_finding(said, process.returncode),), ExitCode.UNAVAILABLE)
        return process.returncode == 0


def _finding(said: bytes, status: int | None) -> Finding:
    """What the process said went wrong; one that was killed has said nothing."""
    try:
        return msgspec.json.decode(said, type=Finding)
    except msgspec.MsgspecError:
        what = f"the process that pulls the code ended with status {status}"
        remedy = "Look at the agent's log, above."
        error = failure("code-not-delivered", what, exit_code=ExitCode.UNAVAILABLE, remedy=remedy, fault=Fault.CLUSTER)
        return error.findings[0]
