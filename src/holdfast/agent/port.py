"""Owns a port kept free for the next rendezvous.

The socket is bound but never listens, so the kernel hands the port to nobody else, while a server that sets
SO_REUSEADDR, as TCPStore's does, can still listen on it.
"""

from __future__ import annotations

import socket


class HeldPort:
    """A port on an address, held until it is renewed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = self._bind()

    @property
    def number(self) -> int:
        return int(self._socket.getsockname()[1])

    def renew(self) -> None:
        """Hold a port that no attempt has used; the last one stays held until then, so that it is not drawn again."""
        fresh = self._bind()
        self._socket.close()
        self._socket = fresh

    def _bind(self) -> socket.socket:
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((self._address, 0))
        return held
