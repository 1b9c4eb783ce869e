"""A node's replica of what its controller may lose: the event log as it is replicated, and the downloaded code.

controller_connection.py receives the order to replicate; log_replica_upload.py sends the replica back.
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
    """A folder of replicated files, written during this agent's lifetime."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / LOG_REPLICA_NAME
        self._position = LogReplicaPosition(bytes=0, signature="")

    @property
    def position(self) -> LogReplicaPosition:
        """How much of the log is here, as far as the controller has signed it."""
        return self._position

    def apply(self, order: ReplicateLog) -> None:
        """Write a part of the log at its position; when the disk is full, the replica stays as it is."""
        if order.offset < self._position.bytes:
            self._position = LogReplicaPosition(bytes=0, signature="")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(self._path, "r+b" if order.offset else "wb", opener=private_opener) as file:
                file.truncate(order.offset)
                file.seek(order.offset)
                file.write(order.data)
        except OSError as error:
            log.warning("the replica of the log ends here: %s", error)
            return
        if order.signature:
            self._position = LogReplicaPosition(bytes=order.offset + len(order.data), signature=order.signature)

    async def upload(self, controller: str, token: str, ca: Path | None) -> None:
        """Send the whole replica to a controller that has lost its log; a restarted controller requests it again."""
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
