"""Reserves a port for the next rendezvous, and detects whether another process has taken it.

The socket is bound but never listens. The kernel then gives the port to no other process, yet a server that sets
SO_REUSEADDR, as TCPStore's does, can listen on it.
"""

from __future__ import annotations

import re
import socket

from holdfast.host.processes import port_owner


class ReservedPort:
    """A reserved port on an address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = self._bind()

    @property
    def number(self) -> int:
        return int(self._socket.getsockname()[1])

    def renew(self) -> None:
        """Reserve a fresh port before releasing the last one, so that the kernel does not pick the same port again."""
        fresh = self._bind()
        self._socket.close()
        self._socket = fresh

    def _bind(self) -> socket.socket:
        reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((self._address, 0))
        return reserved


# Errors of a rank that cannot listen on its rendezvous port:
#   OSError: [Errno 98] Address already in use
#   torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port:
#   29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use
_IN_USE = re.compile(r"address already in use|EADDRINUSE", re.IGNORECASE)
_NAMED = re.compile(r"\bport:? (\d+)")


def port_conflict(error: str, port: int) -> str:
    """Evidence that a rank failed because another process has its rendezvous port; empty if there is none.

    An error that names no port counts only if a process still listens on the port after the rank is gone.
    """
    if not _IN_USE.search(error):
        return ""
    named, holder = _NAMED.search(error), port_owner(port)
    if named is not None and int(named[1]) != port:
        return ""
    if not holder and named is None:
        return ""
    return (
        f"port {port} is taken by {holder}" if holder else f"port {port} was taken; no process listens there any more"
    )
