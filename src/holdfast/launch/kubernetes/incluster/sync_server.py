"""The port of a controller's pod through which clients follow and control the run, from the pod's start to its end.

It listens on the pod's loopback address: clients reach it through the API server's port-forward, with TLS and the run's
token. A connection begins with a line of JSON (`Opening`); the rest is the command's own protocol:

upload    receive the run's code; the response is DONE once it has arrived whole
request   forward a request to the controller, and its response back
follow    stream the event log and rank logs as they grow, from the offsets that the reader has

It runs in threads of the pod's supervisor, so it also serves a run whose controller is restarting or has ended.
Standard library only: its import delays the start of the run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import select
import socket
import ssl
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.host.files import open_regular, regular_opener
from holdfast.run_dir import EVENTS_NAME, RunDir
from holdfast.security.tls import server_context
from holdfast.security.tokens import TokenIssuer, User

SYNC_PORT = 7434
"""The port, on the pod's loopback address."""
POLL_S = 0.1
"""Seconds between polls of files."""
OPENING_S = 10.0
"""Longest time until a client has authenticated."""
SEND_S = 60.0
"""Longest time that a client may leave data unread."""
MAX_CONNECTIONS = 64
"""Connections at a time; another waits until one ends."""
CHUNK_BYTES = 1 << 18
MAX_OPENING_BYTES = 1024
"""Longest opening line."""
MAX_LINE_BYTES = 1 << 24
"""Longest line from a client: a reader sends the sizes of all its files in one."""
MAX_LOG_BYTES = 64 << 20
"""A reader that has nothing of a rank's log gets at most this much of its end; a hole in the reader's file marks the
dropped part. A multiple of every file system's block size."""

SYNCED_FILES = re.compile(re.escape(EVENTS_NAME) + r"|logs/[-a-z0-9]{1,64}/rank-\d{1,9}\.log")
"""Files of a run's folder that are sent; the reader accepts no others."""
LOG_TAIL_KEY, LOG_TAIL_BYTES = "log_tail_crc", 4096
"""Key of the checksum of the last LOG_TAIL_BYTES bytes of the reader's event log."""
DONE = b"done\n"
"""The response to a complete upload."""
SYNCED, COPIED = b"done\n", b"read\n"
"""What a reader sends once it has the whole log: SYNCED from the machine that started the run, after which the pod may
exit; COPIED from any other."""
OTHER_READERS_S = 10.0
"""Longest time that a reader with the whole log waits for the others: what it does next may end the pod."""
_DEADLINE_HEADER = re.compile(rb"(?mi)^(holdfast-expires: )(\S+)")
_LISTENER_CLOSED = (errno.EBADF, errno.EINVAL)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The first line of a connection."""

    token: str
    """The run's token: only its user may use this port."""
    command: str
    """`upload`, `request` or `follow`."""
    digest: str = ""
    """SHA-256 of the uploaded code, in hexadecimal."""
    bytes: int = 0
    """Size of the uploaded code."""

    def line(self) -> bytes:
        """The line as sent."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Opening:
        """The opening in a line; raises ValueError if it is none."""
        match json.loads(line):
            case {"token": str(token), "command": str(command), "digest": str(digest), "bytes": int(size)}:
                return cls(token=token, command=command, digest=digest, bytes=size)
            case _:
                raise ValueError("no opening of this protocol")


class ClientGone(Exception):
    """The client has closed the connection."""


class Client:
    """One connection, with the bytes that have been received but not used."""

    def __init__(self, stream: ssl.SSLSocket) -> None:
        self._stream, self._received = stream, b""

    def send(self, data: bytes) -> None:
        """Send bytes; raises OSError if the client does not read them within SEND_S."""
        self._stream.settimeout(SEND_S)
        self._stream.sendall(data)

    def read_line(self, limit: int) -> bytes:
        """The next line; raises ValueError if it is longer than `limit` bytes, and ClientGone."""
        while b"\n" not in self._received:
            if len(self._received) > limit:
                raise ValueError("a line without an end")
            self._receive()
        line, _, self._received = self._received.partition(b"\n")
        return line

    def read(self) -> bytes:
        """The next bytes, at least one; raises ClientGone."""
        if not self._received:
            self._receive()
        data, self._received = self._received, b""
        return data

    def read_within(self, timeout_s: float) -> bytes | None:
        """The same, or None if none arrive within a time."""
        self.set_timeout(timeout_s)
        try:
            return self.read()
        except TimeoutError:
            return None

    def wait_beside(self, other: socket.socket) -> bool:
        """Wait for bytes of the client or of another socket; whether the client's came first."""
        if self._received or self._stream.pending():
            return True
        self.set_timeout(SEND_S)
        return self._stream in select.select([self._stream, other], [], [])[0]

    def set_timeout(self, timeout_s: float | None) -> None:
        """Longest wait for bytes, which raises TimeoutError; None is forever."""
        self._stream.settimeout(timeout_s)

    def _receive(self) -> None:
        data = self._stream.recv(CHUNK_BYTES)
        if not data:
            raise ClientGone
        self._received += data


@contextlib.contextmanager
def serving(folder: RunDir, port: int = SYNC_PORT) -> Generator[int]:
    """Serve a run's folder until the block ends; yields the port (0 chooses one)."""
    tls, issuer = server_context(folder.identity), TokenIssuer(folder.token.read_text())
    with socket.create_server(("127.0.0.1", port)) as server:
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
    with _reading(folder) as reading:
        log = folder.events
        ends, showing = sent.pop(LOG_TAIL_KEY, None), False
        while True:
            if not showing and log.exists() and not folder.log_unreplicated.exists():
                showing = True
                if ends is not None and ends != log_tail_crc(log, sent[log.name]):
                    sent[log.name] = 0  # of an earlier incarnation: send it from the start
            for name, at, end in _changes(folder, sent, with_log=showing):
                _send(client, folder.path / name, name, at, end)
                sent[name] = end
            client.send(b"{}\n")
            if message := client.read_within(POLL_S):
                if message in (SYNCED, COPIED):
                    _await_other_readers(reading)
                if message == SYNCED:
                    folder.synced.touch()  # the pod may exit now
                return


@contextlib.contextmanager
def _reading(folder: RunDir) -> Generator[int | None]:
    """Hold a lock that all readers of the run share; None if the file system has no locks."""
    try:
        descriptor = regular_opener(str(folder.readers), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        os.close(descriptor)
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _await_other_readers(reading: int | None) -> None:
    """Wait until no other reader holds the lock, at most OTHER_READERS_S."""
    if reading is None:
        return
    fcntl.flock(reading, fcntl.LOCK_UN)
    deadline = time.monotonic() + OTHER_READERS_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(reading, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_S)
        else:
            break


def log_tail_crc(log: Path, size: int) -> int:
    """Checksum of the last bytes before `size` in a log; -1 if there is no log."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, size - LOG_TAIL_BYTES))
            return zlib.crc32(file.read(min(size, LOG_TAIL_BYTES)))
    except FileNotFoundError:
        return -1


def _changes(folder: RunDir, sent: dict[str, int], *, with_log: bool) -> Iterator[tuple[str, int, int]]:
    """Byte ranges of files to send. The event log is read first and sent last, so all that it mentions has arrived."""
    log, known = folder.events, sent.get(folder.events.name, 0)
    end = _whole_lines(log, known) if with_log else known
    # Ranks can create anything there: a link to a file or folder of another run, or a pipe that never ends.
    attempts = (path for path in folder.path.glob("logs/*") if stat.S_ISDIR(path.lstat().st_mode))
    for path in (path for attempt in attempts for path in attempt.glob("*")):
        name = str(path.relative_to(folder.path))
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            continue
        if SYNCED_FILES.fullmatch(name) and (size := about.st_size) != (at := sent.get(name, 0)):
            at = 0 if size < at else at  # its rank has truncated it
            yield name, max(at, _aligned(size - MAX_LOG_BYTES)), size
    if end != known:
        yield log.name, min(end, known), end


def _aligned(offset: int) -> int:
    return max(0, offset - offset % (1 << 20))


def _whole_lines(log: Path, known: int) -> int:
    """End offset of the last complete line after offset `known`, up to which lines are known to be complete."""
    try:
        with open_regular(log) as file:
            size = os.fstat(file.fileno()).st_size
            if size < known:
                return 0  # of an earlier incarnation: send it from the start
            file.seek(known)
            end = known
            while data := file.read(CHUNK_BYTES):
                newline = data.rfind(b"\n")
                end = file.tell() - len(data) + newline + 1 if newline >= 0 else end
            return end
    except FileNotFoundError:
        return known


def _send(client: Client, path: Path, name: str, at: int, end: int) -> None:
    with open(path, "rb", opener=open_no_symlink) as file:
        file.seek(at)
        while at < end and (data := file.read(min(CHUNK_BYTES, end - at))):
            client.send(json.dumps({"name": name, "at": at, "bytes": len(data)}).encode() + b"\n" + data)
            at += len(data)


def open_no_symlink(path: str, flags: int) -> int:
    """Opener for `open` that refuses links and files in linked folders.

    A link in a folder that ranks can write may point to a file that only this pod may read.
    """
    parent, name = os.path.split(path)
    folder = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        return regular_opener(f"/proc/self/fd/{folder}/{name}", flags | os.O_NOFOLLOW)
    finally:
        os.close(folder)


def _log_line(what: str) -> None:
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()
