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

from holdfast.events.agent_events import LOG_REPLICA_NAME, LogReplicaPosition
from holdfast.host.files import private_opener
from holdfast.host.processes import die_with_parent
from holdfast.protocol.orders import ReplicateLog

log = logging.getLogger("holdfast.agent")


class LogReplica:
    """A folder of copies; what is in it is of this agent's life."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / LOG_REPLICA_NAME
        self._position = LogReplicaPosition(bytes=0, signature="")

    @property
    def position(self) -> LogReplicaPosition:
        """How much of the log is here, as far as the controller has vouched for it."""
        return self._position

    def apply(self, order: ReplicateLog) -> None:
        """Put a part of the log in its place; where the disk has no room, what is here is what can be had."""
        if order.offset < self._position.bytes:
            self._position = LogReplicaPosition(bytes=0, signature="")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(self._path, "r+b" if order.offset else "wb", opener=private_opener) as file:
                file.truncate(order.offset)
                file.seek(order.offset)
                file.write(order.data)
        except OSError as error:
            log.warning("the copy of the log ends here: %s", error)
            return
        if order.signature:
            self._position = LogReplicaPosition(bytes=order.offset + len(order.data), signature=order.signature)

    async def upload(self, controller: str, token: str, ca: Path | None) -> None:
        """Give all of it to a controller that has lost its own; one that goes away meanwhile will ask again."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "holdfast.agent.log_replica_upload",
            controller,
            str(self._folder),
            *(("--ca", str(ca)) if ca else ()),
            stdin=asyncio.subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        try:
            request = {"token": token, "bytes": self._position.bytes, "seal": self._position.signature}
            await process.communicate(json.dumps(request).encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
