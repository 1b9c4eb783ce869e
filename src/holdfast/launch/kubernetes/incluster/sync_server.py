"""The port of a controller's pod through which clients follow and control the run, from the pod's start to its end.

Clients reach it with TLS and the run's token: through the API server's port-forward, which ends at the pod's loopback
address, or through the cluster's Gateway, which connects to the pod's own. A connection begins with a line of JSON
(`Opening`); the rest is the command's own protocol:

upload    receive the run's code; the response is DONE once it has arrived whole
request   forward a request to the controller, and its response back
follow    stream the event log and rank logs as they grow, from the offsets that the reader has, and why controllers
          fail if they keep failing

It runs in threads of the pod's supervisor, so it also serves a run whose controller is restarting or has ended.
Standard library only: its import delays the start of the run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Generator

from holdfast.launch.changed_files import CHUNK_BYTES, LOG_TAIL_KEY, changes, log_tail_crc, read_range
from holdfast.launch.kubernetes.incluster.client_connection import SEND_S, Client, ClientGone, Opening
from holdfast.launch.kubernetes.incluster.reader_lock import await_other_readers, reading
from holdfast.run_dir import RunDir
from holdfast.security.tls import server_context
from holdfast.security.tokens import TokenIssuer, User

SYNC_PORT = 7434
"""The port."""
LOOPBACK = "127.0.0.1"
POLL_S = 0.1
"""Seconds between polls of files."""
FAILING_POLL_S = 1.0
"""Seconds between reads of the record of failing controllers."""
OPENING_S = 10.0
"""Longest time until a client has authenticated."""
MAX_CONNECTIONS = 64
"""Connections at a time; another waits until one ends."""
MAX_OPENING_BYTES = 1024
"""Longest opening line."""
MAX_LINE_BYTES = 1 << 24
"""Longest line from a client: a reader sends the sizes of all its files in one."""
MIN_FAILURES = 2
"""Controllers in a row that must have failed before clients receive the reason."""
MAX_LAST_WORDS = 220
"""Characters of a controller's last line that clients get: escaped, they fit into a header (sync/file_copy.py)."""
DONE = b"done\n"
"""The response to a complete upload."""
SYNCED, COPIED = b"done\n", b"read\n"
"""What a reader sends once it has the whole log: SYNCED from the machine that started the run, after which the pod may
exit; COPIED from any other."""
_DEADLINE_HEADER = re.compile(rb"(?mi)^(holdfast-expires: )(\S+)")
_LISTENER_CLOSED = (errno.EBADF, errno.EINVAL)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@contextlib.contextmanager
def serving(folder: RunDir, port: int = SYNC_PORT, address: str = LOOPBACK) -> Generator[int]:
    """Serve a run's folder until the block ends; yields the port (0 chooses one)."""
    tls, issuer = server_context(folder.identity), TokenIssuer(folder.token.read_text())
    with socket.create_server((address, port)) as server:
        threading.Thread(target=_accept_clients, args=(server, tls, issuer, folder), daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which closing would not


def _accept_clients(server: socket.socket, tls: ssl.SSLContext, issuer: TokenIssuer, folder: RunDir) -> None:
    free = threading.BoundedSemaphore(MAX_CONNECTIONS)
    while True:
        free.acquire()
        try:
            plain, _ = server.accept()
        except OSError as error:
            if server.fileno() < 0 or error.errno in _LISTENER_CLOSED:
                return
            _log_line(f"a client could not be accepted: {error}")
            time.sleep(POLL_S)  # out of descriptors, say
            free.release()
            continue
        threading.Thread(target=_serve_client, args=(plain, tls, issuer, folder, free), daemon=True).start()


def _serve_client(
    plain: socket.socket, tls: ssl.SSLContext, issuer: TokenIssuer, folder: RunDir, free: threading.BoundedSemaphore
) -> None:
    """Serve one connection; an error ends this connection alone."""
    try:
        plain.settimeout(OPENING_S)
        with plain, tls.wrap_socket(plain, server_side=True) as stream:
            serve(Client(stream), issuer, folder)
            stream.settimeout(SEND_S)
            with contextlib.suppress(OSError):
                stream.unwrap()  # the proof for the client that nothing is missing at the end
    except (ClientGone, ConnectionError, ssl.SSLEOFError):
        pass  # clients' machines sleep and lose their network
    except Exception as error:  # a failing connection must never end the supervisor
        _log_line(f"a client's connection ended: {type(error).__name__}: {error}")
    finally:
        free.release()


def serve(client: Client, issuer: TokenIssuer, folder: RunDir) -> None:
    """Authenticate a client and run its command; raises ClientGone, OSError and ValueError."""
    deadline = time.monotonic() + OPENING_S
    client.set_timeout(OPENING_S)
    opening = Opening.parse(client.read_line(MAX_OPENING_BYTES))
    if issuer.principal(opening.token) != User():
        raise ValueError("a wrong token")
    if time.monotonic() > deadline:
        raise TimeoutError("no opening in time")
    client.set_timeout(None)
    match opening.command:
        case "upload":
            _receive_code(client, folder, opening)
        case "request":
            _forward_request(client, folder)
        case "follow":
            _send_changes(client, folder)
        case _:
            raise ValueError(f"unknown command {opening.command[:80]!r}")


def shift_deadline(head: bytes, change_s: Callable[[], float]) -> bytes:
    """A request's head with its deadline shifted, because the clocks of two machines are unrelated."""
    return _DEADLINE_HEADER.sub(lambda found: found[1] + repr(float(found[2]) + change_s()).encode(), head)


def request_deadline(head: bytes) -> float:
    """Deadline of a request on this machine's clock; 0 if it has none."""
    found = _DEADLINE_HEADER.search(head)
    return float(found[2]) if found else 0.0


def _receive_code(client: Client, folder: RunDir, opening: Opening) -> None:
    """Write the run's code atomically, if its digest matches."""
    if not _DIGEST.fullmatch(opening.digest):
        raise ValueError("no SHA-256 digest")
    from holdfast.launch.code.archive import archive_path  # late: imports tarfile, and most code is small

    path = archive_path(folder.code, opening.digest)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh, found = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}"), hashlib.sha256()
        try:
            with fresh.open("wb") as file:
                while file.tell() < opening.bytes:
                    data = client.read()
                    found.update(data)
                    file.write(data)
            if found.hexdigest() != opening.digest:
                raise ValueError(f"{path.name} did not arrive whole")
            fresh.rename(path)
        finally:
            fresh.unlink(missing_ok=True)
    client.send(DONE)


def _forward_request(client: Client, folder: RunDir) -> None:
    """Relay between a client and the controller's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as controller:
        directory = os.open(folder.path, os.O_PATH | os.O_DIRECTORY)
        try:  # through /proc, because a Unix socket's path holds 107 bytes
            controller.connect(f"/proc/self/fd/{directory}/{folder.control_socket.name}")
        finally:
            os.close(directory)
        head = b""
        while b"\r\n\r\n" not in head and len(head) < MAX_LINE_BYTES:
            head += client.read()
        controller.sendall(shift_deadline(head, time.monotonic))
        while True:
            if client.wait_beside(controller):
                controller.sendall(client.read())
            elif data := controller.recv(CHUNK_BYTES):
                client.send(data)
            else:
                return


def _send_changes(client: Client, folder: RunDir) -> None:
    """Send what the reader lacks, poll by poll, until it reports that it has everything or disconnects."""
    sent: dict[str, int] = json.loads(client.read_line(MAX_LINE_BYTES))
    with reading(folder) as lock:
        log = folder.events
        ends, showing = sent.pop(LOG_TAIL_KEY, None), False
        failing, failing_poll = "", 0.0
        while True:
            if not showing and log.exists() and not folder.log_unreplicated.exists():
                showing = True
                if ends is not None and ends != log_tail_crc(log, sent[log.name]):
                    sent[log.name] = 0  # of an earlier incarnation: send it from the start
            for name, at, end in changes(folder, sent, with_log=showing):
                for place, data in read_range(folder.path / name, at, end):
                    header = json.dumps({"name": name, "at": place, "bytes": len(data)})
                    client.send(header.encode() + b"\n" + data)
                sent[name] = end
            if (now := time.monotonic()) >= failing_poll:
                failing, failing_poll = _last_words(folder), now + FAILING_POLL_S
            client.send(json.dumps({"failing": failing} if failing else {}).encode() + b"\n")
            if message := client.read_within(POLL_S):
                if message in (SYNCED, COPIED):
                    await_other_readers(lock)
                if message == SYNCED:
                    folder.synced.touch()  # the pod may exit now
                return


def _last_words(folder: RunDir) -> str:
    """The last line that a controller logged, if controllers keep failing; empty if they do not."""
    if folder.read_controller_record().get("failed", 0) < MIN_FAILURES:
        return ""
    words = next(iter(folder.controller_log_tail()[-1:]), "")
    printable = "".join(letter if " " <= letter <= "~" else "?" for letter in words[:MAX_LAST_WORDS])
    return printable or "it logged nothing"


def _log_line(what: str) -> None:
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()
