"""Hosts the TCPStore that the ranks of an attempt meet at, in its own process, as torchelastic's agent does.

It is started as a script by the agent, with the Python of the ranks, and imports nothing but torch and the standard
library. Standard input is a socket, with one message at a time: `REPLICA PORT` and a socket that listens at that port,
where the store of that replica is from now on; port 0, without a socket, closes it. Each is answered by a line:
`serving PORT`, `closed`, or what went wrong. The process ends with its input.
"""

from __future__ import annotations

import socket
import sys

del sys.path[0]  # this folder, whose modules no import of torch's may take for its own


def main() -> None:
    """Serve until standard input ends."""
    from torch.distributed import TCPStore

    stores: dict[str, TCPStore] = {}
    link = socket.socket(fileno=sys.stdin.fileno())
    while True:
        message, sockets, _, _ = socket.recv_fds(link, 1024, 1)
        if not message:
            return
        replica, port = message.decode().split()
        stores.pop(replica, None)  # its destructor closes the port
        outcome = "closed"
        if sockets:
            try:
                stores[replica] = TCPStore(
                    "localhost", int(port), is_master=True, wait_for_workers=False, master_listen_fd=sockets[0]
                )
                outcome = f"serving {port}"
            except Exception as error:
                outcome = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        sys.stdout.write(f"{outcome}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
