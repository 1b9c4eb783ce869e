"""Hosts the TCPStore of an attempt's rendezvous in a separate process, as torchelastic's agent does.

The agent starts it as a script with the ranks' Python; it imports only torch and the standard library. Each line of
standard input is `REPLICA PORT`: serve that replica's store at that port from now on; port 0 closes it. It answers each
with a line: `serving PORT`, `closed`, or the error. The process ends with its input.
"""

from __future__ import annotations

import socket
import sys

del sys.path[0]  # this folder: its modules must not shadow any import of torch


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
        answer = "closed"
        if int(port):
            try:
                # The address makes no difference: the server listens on all of the host's addresses.
                stores[replica] = TCPStore("localhost", int(port), is_master=True, wait_for_workers=False)
                answer = f"serving {port}"
            except Exception as error:
                answer = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
