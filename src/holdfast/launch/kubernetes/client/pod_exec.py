"""Runs a command in a pod and exchanges data with it, as `kubectl exec` does.

The protocol is v5.channel.k8s.io: a message's first byte is its channel. cluster.py makes the connection.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

PROTOCOL = "v5.channel.k8s.io"
MESSAGE_BYTES = 1 << 20
"""Largest message in either direction."""

_STDIN, _STDOUT, _STDERR, _STATUS, _CLOSE = 0, 1, 2, 3, 255
_CHUNK_BYTES = 64 * 1024
_MAX_STDERR_BYTES = 4096


class ExecSocket(Protocol):
    """The WebSocket methods that are used here."""

    async def send_bytes(self, data: bytes) -> None: ...

    async def receive_bytes(self) -> bytes: ...


class CommandFailed(Exception):
    """A command in a pod failed; the text is its error output."""


class PodExec:
    """A command that runs in a pod, while its connection is open."""

    def __init__(self, socket: ExecSocket) -> None:
        self._socket = socket
        self._stderr = b""

    async def send(self, data: bytes) -> None:
        """Write to its standard input."""
        for start in range(0, len(data), _CHUNK_BYTES):
            await self._socket.send_bytes(bytes([_STDIN]) + data[start : start + _CHUNK_BYTES])

    async def end_input(self) -> None:
        """Close its standard input."""
        await self._socket.send_bytes(bytes([_CLOSE, _STDIN]))

    async def output(self) -> AsyncIterator[bytes]:
        """Its standard output until it ends; raises CommandFailed if it fails."""
        while True:
            message = await self._socket.receive_bytes()
            channel, data = message[0], message[1:]
            if channel == _STDOUT and data:
                yield data
            elif channel == _STDERR:
                self._stderr = (self._stderr + data)[-_MAX_STDERR_BYTES:]
            elif channel == _STATUS:
                status: Mapping[str, Any] = json.loads(data)
                if status.get("status") != "Success":
                    words = self._stderr.decode(errors="replace").strip()
                    raise CommandFailed(words or status.get("message", "it failed"))
                return
