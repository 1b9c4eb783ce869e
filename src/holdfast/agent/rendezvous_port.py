"""Owns a port kept free for the next rendezvous, and the question whether a stranger has taken it nonetheless.

The socket is bound but never listens, so the kernel hands the port to nobody else, while a server that sets
SO_REUSEADDR, as TCPStore's does, can still listen on it.
"""

from __future__ import annotations

import re
import socket

from holdfast.host.processes import port_owner


class ReservedPort:
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
        reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((self._address, 0))
        return reserved


# What a rank says when it cannot listen where its peers are to meet it.
#   OSError: [Errno 98] Address already in use
#   torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port:
#   29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use
_IN_USE = re.compile(r"address already in use|EADDRINUSE", re.IGNORECASE)
_NAMED = re.compile(r"\bport:? (\d+)")


def port_conflict(error: str, port: int) -> str:
    """The evidence that a rank ended because a stranger has its rendezvous port; empty when it did not.

    An error that names no port is about this one only if somebody listens there now that the rank is gone.
    """
    if not _IN_USE.search(error):
        return ""
    named, holder = _NAMED.search(error), port_owner(port)
    if named is not None and int(named[1]) != port:
        return ""
    if not holder and named is None:
        return ""
    return f"port {port} is taken by {holder}" if holder else f"port {port} was taken; nobody listens there any more"
