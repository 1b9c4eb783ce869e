"""Hosts the TCPStore that the ranks of an attempt meet at, as torchelastic's agent does, in a process of its own.

It is started as a script by the agent, with the Python of the ranks, and imports nothing but torch and the standard
library. Each line of standard input is `REPLICA PORT`: the store of that replica is from now on at that port; port 0
closes it. Each is answered by a line: `serving PORT`, `closed`, or what went wrong. The process ends with its input.
"""

from __future__ import annotations

import sys

del sys.path[0]  # this folder, whose modules no import of torch's may take for its own


def main() -> None:
    """Serve until standard input ends."""
    from torch.distributed import TCPStore

    stores: dict[str, TCPStore] = {}
    for line in sys.stdin:
        replica, port = line.split()
        stores.pop(replica, None)  # its destructor closes the port
        said = "closed"
        if int(port):
            try:
                # One of the host's own addresses makes no difference: the server listens on all of them.
                stores[replica] = TCPStore("localhost", int(port), is_master=True, wait_for_workers=False)
                said = f"serving {port}"
            except Exception as error:
                said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
