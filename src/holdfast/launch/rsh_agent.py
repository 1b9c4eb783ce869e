"""Replaces ssh between `mpirun` and the other nodes: a process on each node waits for its one command.

    python -P -m holdfast.launch.rsh_agent                 on such a node: wait, then become Open MPI's daemon
    python -P -m holdfast.launch.rsh_agent HOST WORD...    what mpirun calls in place of ssh

The node's agent starts the waiting process like any rank, so it watches, logs and stops the daemon like any rank. The
process accepts one command, from a peer that has the key of the attempt.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import NoReturn

CONNECT_TIMEOUT_S = 600.0
"""Longest time that the two ends wait for each other: code download and slow disks delay a node's start."""
EXCHANGE_TIMEOUT_S = 60.0
"""Longest time that a connected peer may take to send its command."""
MAX_PEERS = 64
"""Most open connections; one more closes the oldest."""
RETRY_S = 0.1
NONCE_BYTES = 32
MAC_BYTES = 32
COMMAND_LIMIT_BYTES = 1024 * 1024

LISTEN = "HOLDFAST_MPI_LISTEN"
"""The address that a node listens on, as `ADDRESS:PORT`."""
NODES = "HOLDFAST_MPI_NODES"
"""Addresses of all other nodes, as comma-separated `NAME=ADDRESS:PORT`; mpirun uses the same names."""
SCRATCH = "OMPI_MCA_orte_tmpdir_base"
"""Folder for Open MPI's files: next to the rank's socket, so the agent removes it."""
KEY = "HOLDFAST_MPI_KEY"
"""Key that proves that a command comes from the mpirun of the same attempt."""


def main(arguments: list[str], environ: MutableMapping[str, str]) -> NoReturn:
    """Send a command to the node it names; without arguments wait for this node's command."""
    if arguments:
        host, *words = arguments
        # mpirun passes the head node's own folder to the daemon; the daemon needs its node's.
        command = " ".join(words).replace(environ[SCRATCH], "$HOLDFAST_RANK_SOCKET.d")
        sys.exit(send_command(host, command, environ))
    command = await_command(environ[LISTEN], environ.pop(KEY))
    if command is None:
        sys.exit(
            f"RuntimeError: no mpirun has called within {CONNECT_TIMEOUT_S:g} s; does it start ranks on other nodes?"
        )
    # Unless mpirun sets paths first, no shell needs to stay between the agent and the daemon.
    shell = f"exec {command}" if command.split()[:1] == ["orted"] else command
    os.execvpe("sh", ["sh", "-c", shell], environ)


def await_command(listen: str, key: str, within_s: float = CONNECT_TIMEOUT_S) -> str | None:
    """Wait for a command from a peer that has the key; None after `within_s` seconds."""
    # The agent reserves the port; like TCPStore, create_server sets SO_REUSEADDR, so this process can listen on it.
    with socket.create_server(_address(listen), backlog=MAX_PEERS) as server:
        listener = CommandListener(server, key)
        threading.Thread(target=listener.listen, daemon=True).start()
        try:
            return listener.commands.get(timeout=within_s)
        except queue.Empty:
            return None
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # closing alone would not wake `accept`


class CommandListener:
    """Reads from peers, each in its own thread, until one sends an authentic command."""

    def __init__(self, server: socket.socket, key: str) -> None:
        self.commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._server = server
        self._key = key
        self._peers: deque[socket.socket] = deque()
        self._accepted = threading.Lock()
        """Never released once a command is accepted."""

    def listen(self) -> None:
        """Accept peers until the server is closed."""
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            self._peers.append(peer)
            if len(self._peers) > MAX_PEERS:
                _disconnect(self._peers.popleft())
            threading.Thread(target=self._receive, args=(peer,), daemon=True).start()

    def _receive(self, peer: socket.socket) -> None:
        """Accept a peer's command if its MAC fits the key and this connection's nonce."""
        deadline = time.monotonic() + EXCHANGE_TIMEOUT_S
        nonce = secrets.token_bytes(NONCE_BYTES)
        with contextlib.suppress(OSError), peer:
            peer.sendall(nonce)
            data = _read(peer, MAC_BYTES + COMMAND_LIMIT_BYTES, deadline)
            mac, command = data[:MAC_BYTES], data[MAC_BYTES:]
            authentic = bool(command) and hmac.compare_digest(mac, _mac(self._key, nonce, command))
            if authentic and self._accepted.acquire(blocking=False):
                peer.sendall(b"taken")
                self.commands.put(os.fsdecode(command))
        with contextlib.suppress(ValueError):
            self._peers.remove(peer)


def _disconnect(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def send_command(
    host: str, command: str, environ: Mapping[str, str], within_s: float = CONNECT_TIMEOUT_S
) -> str | None:
    """Send a command to the named node; returns the error message, or None."""
    nodes = dict(entry.split("=") for entry in environ[NODES].split(",") if entry)
    if host not in nodes:
        return f"RuntimeError: mpirun wants to start ranks on `{host}`, which is no node of this attempt: {[*nodes]}"
    try:
        with _connect(_address(nodes[host]), time.monotonic() + within_s) as peer:
            deadline = time.monotonic() + EXCHANGE_TIMEOUT_S
            nonce = _read(peer, NONCE_BYTES, deadline)
            peer.sendall(_mac(environ[KEY], nonce, os.fsencode(command)) + os.fsencode(command))
            peer.shutdown(socket.SHUT_WR)
            return (
                None if _read(peer, 5, deadline) == b"taken" else f"RuntimeError: {host} has refused mpirun's command"
            )
    except OSError as error:
        return f"RuntimeError: mpirun's command cannot be sent to {host} at {nodes[host]}: {error}"


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    """Connect to a node that may not be listening yet."""
    while True:
        try:
            return socket.create_connection(address, timeout=EXCHANGE_TIMEOUT_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


def _read(peer: socket.socket, limit: int, deadline: float) -> bytes:
    """Read up to `limit` bytes or to end of file; raises TimeoutError at the deadline (monotonic seconds)."""
    data = bytearray()
    while len(data) < limit:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the other end takes too long")
        peer.settimeout(left_s)
        if not (more := peer.recv(limit - len(data))):
            break
        data += more
    return bytes(data)


def _mac(key: str, nonce: bytes, command: bytes) -> bytes:
    return hmac.new(key.encode(), nonce + command, hashlib.sha256).digest()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
