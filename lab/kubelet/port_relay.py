"""Relays standard input and output to a TCP port of this network namespace: `python port_relay.py PORT`."""

from __future__ import annotations

import os
import socket
import sys
import threading

_CHUNK_BYTES = 1 << 16


def main() -> None:
    """Relay until the port's end closes the connection."""
    try:
        remote = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    except OSError as error:
        sys.exit(f"failed to connect to localhost:{sys.argv[1]} inside the pod: {error}")
    threading.Thread(target=_pump_input, args=(remote,), daemon=True).start()
    while data := remote.recv(_CHUNK_BYTES):
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]


def _pump_input(remote: socket.socket) -> None:
    while data := os.read(0, _CHUNK_BYTES):
        remote.sendall(data)
    remote.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
