"""Lets one node at a time use a host, among the runs of all users.

The lock is an abstract Unix socket, which all users of the host see and which is free when no process holds it. The
node's agent inherits it, so it lasts as long as the agent. A second socket has the holder in its name.
"""

from __future__ import annotations

import errno
import getpass
import socket
from pathlib import Path

_LOCK = "\0holdfast-node"
_HOLDER = f"{_LOCK}-of/"


def lock_host(run: str) -> tuple[socket.socket, ...] | str:
    """The sockets that hold the lock, for the node's agent to inherit; or who has it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(_LOCK)
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return _holder()
    holder = socket.socket(socket.AF_UNIX)
    holder.bind(f"{_HOLDER}{run} of {getpass.getuser()}"[:100])
    return lock, holder


def _holder() -> str:
    prefix = "@" + _HOLDER[1:]
    names = (line.partition(prefix)[2] for line in Path("/proc/net/unix").read_text().splitlines() if prefix in line)
    return f"it is in use by {next(names, 'another run')}"
