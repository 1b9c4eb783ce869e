"""A node's unpacked code; code_download.py downloads what is missing."""

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
from holdfast.findings import Finding, Owner
from holdfast.host.processes import die_with_parent
from holdfast.protocol import routes

log = logging.getLogger("holdfast.agent")

EXIT_CONTROLLER_UNREACHABLE = os.EX_TEMPFAIL
"""Exit code of code_download.py when the controller stayed unreachable."""


class CodeCache:
    """Folders of unpacked code by digest, downloaded from the controller.

    `controller_url` returns the agent's current WebSocket URL of the controller. `log_replica` is the folder that keeps
    the archives, if they are to be kept.
    """

    def __init__(
        self,
        controller_url: Callable[[], str],
        token: str,
        folder: Path,
        *,
        ca: Path | None = None,
        log_replica: Path | None = None,
    ) -> None:
        self._controller_url = controller_url
        self._token = token
        self._folder = folder
        self._ca_options = () if ca is None else ("--ca", str(ca))
        self._log_replica_options = () if log_replica is None else ("--log-replica", str(log_replica))

    async def get(self, digest: str) -> Path:
        """Return the unpacked code, downloading it if it is missing; raise HoldfastError on failure."""
        path = self._folder / digest
        while not path.is_dir() and not await self._download(digest):
            log.warning("the code cannot be pulled as long as the controller is out of reach")
        return path

    async def _download(self, digest: str) -> bool:
        """Download and unpack the code; return whether the controller was reachable."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "holdfast.agent.code_download",
            routes.http_url(self._controller_url(), routes.CODE + digest),
            str(self._folder),
            *self._ca_options,
            *self._log_replica_options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        try:
            output, _ = await process.communicate(self._token.encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if process.returncode not in (0, EXIT_CONTROLLER_UNREACHABLE):
            raise HoldfastError((_finding(output, process.returncode),), ExitCode.UNAVAILABLE)
        return process.returncode == 0


def _finding(output: bytes, status: int | None) -> Finding:
    """The finding that the process printed; if it printed none, one with its exit status."""
    try:
        return msgspec.json.decode(output, type=Finding)
    except msgspec.MsgspecError:
        what = f"the process that pulls the code ended with status {status}"
        remedy = "Look at the agent's log, above."
        error = failure("code-not-delivered", what, exit_code=ExitCode.UNAVAILABLE, remedy=remedy, owner=Owner.CLUSTER)
        return error.findings[0]
