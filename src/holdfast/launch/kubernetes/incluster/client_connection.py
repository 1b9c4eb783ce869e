"""A client's connection to the pod of a run's controller: its first line, and what it sends after it."""

from __future__ import annotations

import json
import select
import socket
import ssl

import msgspec
from msgspec import Struct

from holdfast.launch.changed_files import CHUNK_BYTES

SEND_S = 60.0
"""Longest time that a client may leave data unread."""


class Opening(Struct, frozen=True, kw_only=True):
    """The first line of a connection."""

    token: str
    """The run's token: only its user may use this port."""
    command: str
    """`upload`, `request` or `follow`."""
    digest: str = ""
    """SHA-256 of the uploaded code, in hexadecimal."""
    bytes: int = 0
    """Size of the uploaded code."""

    def line(self) -> bytes:
        """The line as sent."""
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Opening:
        """The opening in a line; raises ValueError if it is none."""
        match json.loads(line):
            case {"token": str(token), "command": str(command), "digest": str(digest), "bytes": int(size)}:
                return cls(token=token, command=command, digest=digest, bytes=size)
            case _:
                raise ValueError("no opening of this protocol")


class ClientGone(Exception):
    """The client has closed the connection."""


class Client:
    """One connection, with the bytes that have been received but not used."""

    def __init__(self, stream: ssl.SSLSocket) -> None:
        self._stream, self._received = stream, b""

    def send(self, data: bytes) -> None:
        """Send bytes; raises OSError if the client does not read them within SEND_S."""
        self._stream.settimeout(SEND_S)
        self._stream.sendall(data)

    def read_line(self, limit: int) -> bytes:
        """The next line; raises ValueError if it is longer than `limit` bytes, and ClientGone."""
        while b"\n" not in self._received:
            if len(self._received) > limit:
                raise ValueError("a line without an end")
            self._receive()
        line, _, self._received = self._received.partition(b"\n")
        return line

    def read(self) -> bytes:
        """The next bytes, at least one; raises ClientGone."""
        if not self._received:
            self._receive()
        data, self._received = self._received, b""
        return data

    def read_within(self, timeout_s: float) -> bytes | None:
        """The same, or None if none arrive within a time."""
        self.set_timeout(timeout_s)
        try:
            return self.read()
        except TimeoutError:
            return None

    def wait_beside(self, other: socket.socket) -> bool:
        """Wait for bytes of the client or of another socket; whether the client's came first."""
        if self._received or self._stream.pending():
            return True
        self.set_timeout(SEND_S)
        return self._stream in select.select([self._stream, other], [], [])[0]

    def set_timeout(self, timeout_s: float | None) -> None:
        """Longest wait for bytes, which raises TimeoutError; None is forever."""
        self._stream.settimeout(timeout_s)

    def _receive(self) -> None:
        data = self._stream.recv(CHUNK_BYTES)
        if not data:
            raise ClientGone
        self._received += data
