"""A connection to a port of a pod through the API server, as `kubectl port-forward` makes it.

The protocol is v4.channel.k8s.io: a message's first byte is its channel. cluster.py makes the connection.
"""

from __future__ import annotations

from typing import Protocol

PROTOCOL = "v4.channel.k8s.io"
MESSAGE_BYTES = 1 << 20
"""Largest message in either direction."""

_DATA, _ERROR = 0, 1
_CHUNK_BYTES = 64 * 1024


class PortSocket(Protocol):
    """The WebSocket methods that are used here."""

    async def send_bytes(self, data: bytes) -> None: ...

    async def receive_bytes(self) -> bytes: ...


class PortClosed(Exception):
    """The port cannot be reached, or the other end has sent something that is not of holdfast's protocol."""


class PodPort:
    """One connection to a port of a pod."""

    def __init__(self, socket: PortSocket) -> None:
        self._socket = socket
        self._opened = set[int]()
        """Channels whose first message, the port's number, has been received."""

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        for start in range(0, len(data), _CHUNK_BYTES):
            await self._socket.send_bytes(bytes([_DATA]) + data[start : start + _CHUNK_BYTES])

    async def receive(self) -> bytes:
        """The next bytes; raises PortClosed if nothing listens at the port."""
        while True:
            message = await self._socket.receive_bytes()
            if not message:
                continue
            channel, data = message[0], message[1:]
            if channel not in self._opened:
                self._opened.add(channel)
            elif channel == _ERROR and data:
                raise PortClosed(data.decode(errors="replace").strip())
            elif channel == _DATA and data:
                return data
