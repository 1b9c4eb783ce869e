"""Owns a node's copies of what its controller may lose: the run's log as it is told, and the code as it was pulled.

Refuses to own when a controller wants them (link.py hears that) and how they travel back (handback.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from pathlib import Path

from holdfast.events.agent import LOG_NAME, LogCopy
from holdfast.events.orders import KeepLog
from holdfast.host.files import private
from holdfast.host.processes import die_with_parent

log = logging.getLogger("holdfast.agent")


class Copies:
    """A folder of copies; what is in it is of this agent's life."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / LOG_NAME
        self._sealed = LogCopy(bytes=0, seal="")

    @property
    def log(self) -> LogCopy:
        """How much of the log is here, as far as the controller has vouched for it."""
        return self._sealed

    def take(self, order: KeepLog) -> None:
        """Put a part of the log in its place; where the disk has no room, what is here is what can be had."""
        if order.at < self._sealed.bytes:
            self._sealed = LogCopy(bytes=0, seal="")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(self._log, "r+b" if order.at else "wb", opener=private) as file:
                file.truncate(order.at)
                file.seek(order.at)
                file.write(order.data)
        except OSError as error:
            log.warning("the copy of the log ends here: %s", error)
            return
        if order.seal:
            self._sealed = LogCopy(bytes=order.at + len(order.data), seal=order.seal)

    async def hand_back(self, controller: str, token: str, ca: Path | None) -> None:
        """Give all of it to a controller that has lost its own; one that goes away meanwhile will ask again."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "holdfast.agent.handback",
            controller,
            str(self._folder),
            *(("--ca", str(ca)) if ca else ()),
            stdin=asyncio.subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        try:
            told = {"token": token, "bytes": self._sealed.bytes, "seal": self._sealed.seal}
            await process.communicate(json.dumps(told).encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
