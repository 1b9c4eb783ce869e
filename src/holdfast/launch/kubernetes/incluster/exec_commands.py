"""Commands that the sync process runs in the controller's pod, as with `kubectl exec`.

python -m holdfast.launch.kubernetes.incluster.exec_commands FOLDER COMMAND

upload NAME DIGEST   receive a file of the run, such as its code, on standard input
request              forward a request from standard input to the controller, and its response back
follow               stream the event log and rank logs as they grow, from the offsets that the reader has

Standard library only: a new process starts for every request.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import select
import socket
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.host.files import open_regular, regular_opener
from holdfast.run_dir import EVENTS_NAME, RunDir

POLL_S = 0.1
"""Seconds between polls of files."""
CHUNK_BYTES = 1 << 18
MAX_LOG_BYTES = 64 << 20
"""A reader that has nothing of a rank's log gets at most this much of its end; a hole in the reader's file marks the
dropped part. A multiple of every file system's block size."""

SYNCED_FILES = re.compile(re.escape(EVENTS_NAME) + r"|logs/[-a-z0-9]{1,64}/rank-\d{1,9}\.log")
"""Files of a run's folder that are sent; the reader accepts no others."""
LOG_TAIL_KEY, LOG_TAIL_BYTES = "log_tail_crc", 4096
"""Key of the checksum of the last LOG_TAIL_BYTES bytes of the reader's event log."""
SYNCED, COPIED = b"done\n", b"read\n"
"""What a reader sends once it has the whole log: SYNCED from the machine that started the run, after which the pod may
exit; COPIED from any other."""
OTHER_READERS_S = 10.0
"""Longest time that a reader with the whole log waits for the others: what it does next may end the pod."""
_DEADLINE_HEADER = re.compile(rb"(?mi)^(holdfast-expires: )(\S+)")


def main() -> int:
    """Run the command on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="holdfast.launch.kubernetes.incluster.exec_commands")
    parser.add_argument("folder", type=Path)
    what = parser.add_subparsers(dest="what", required=True)
    upload = what.add_parser("upload")
    upload.add_argument("name")
    upload.add_argument("digest")
    what.add_parser("request")
    what.add_parser("follow")
    options = parser.parse_args()
    folder = RunDir(options.folder)
    match options.what:
        case "upload":
            _receive_file(folder.path / options.name, options.digest)
        case "request":
            _forward_request(folder)
        case _:
            _send_changes(folder)
    return 0


def shift_deadline(head: bytes, change_s: Callable[[], float]) -> bytes:
    """A request's head with its deadline shifted, because the clocks of two machines are unrelated."""
    return _DEADLINE_HEADER.sub(lambda found: found[1] + repr(float(found[2]) + change_s()).encode(), head)


def request_deadline(head: bytes) -> float:
    """Deadline of a request on this machine's clock; 0 if it has none."""
    found = _DEADLINE_HEADER.search(head)
    return float(found[2]) if found else 0.0


def _receive_file(path: Path, digest: str) -> None:
    """Write a file atomically, if its digest matches."""
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh, found = path.with_suffix(f".{os.getpid()}"), hashlib.sha256()
    with fresh.open("wb") as file:
        while data := sys.stdin.buffer.read(CHUNK_BYTES):
            found.update(data)
            file.write(data)
    if found.hexdigest() != digest:
        fresh.unlink()
        sys.exit(f"{path.name} did not arrive whole")
    fresh.rename(path)


def _forward_request(folder: RunDir) -> None:
    """Relay between standard input and output and the controller's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as controller:
        os.chdir(folder.path)  # a Unix socket's path holds 107 bytes
        controller.connect(folder.control_socket.name)
        threading.Thread(target=_forward_stdin, args=(controller,), daemon=True).start()
        while data := controller.recv(CHUNK_BYTES):
            _write(data)


def _forward_stdin(controller: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data and (more := os.read(0, CHUNK_BYTES)):
        data += more
    data = shift_deadline(data, time.monotonic)
    while data:
        controller.sendall(data)
        data = os.read(0, CHUNK_BYTES)
    controller.shutdown(socket.SHUT_RDWR)


def _send_changes(folder: RunDir) -> None:
    """Send what the reader lacks, poll by poll, until it reports that it has everything or disconnects."""
    reading = _lock_for_reading(folder)
    sent: dict[str, int] = json.loads(sys.stdin.buffer.readline())
    log = folder.events
    ends, showing = sent.pop(LOG_TAIL_KEY, None), False
    while True:
        if not showing and log.exists() and not folder.log_unreplicated.exists():
            showing = True
            if ends is not None and ends != log_tail_crc(log, sent[log.name]):
                sent[log.name] = 0  # of an earlier incarnation: send it from the start
        for name, at, end in _changes(folder, sent, with_log=showing):
            _send(folder.path / name, name, at, end)
            sent[name] = end
        _write(b"{}\n")
        if select.select([0], [], [], POLL_S)[0]:
            word = os.read(0, 16).strip() + b"\n"
            if word in (SYNCED, COPIED):
                _await_other_readers(reading)
            if word == SYNCED:
                folder.synced.touch()  # the pod may exit now
            return


def _lock_for_reading(folder: RunDir) -> int | None:
    """A lock that all readers of the run share; None if the file system has no locks."""
    try:
        descriptor = regular_opener(str(folder.readers), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        return None
    return descriptor


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
    os.close(reading)


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


def _send(path: Path, name: str, at: int, end: int) -> None:
    with open(path, "rb", opener=open_no_symlink) as file:
        file.seek(at)
        while at < end and (data := file.read(min(CHUNK_BYTES, end - at))):
            _write(json.dumps({"name": name, "at": at, "bytes": len(data)}).encode() + b"\n" + data)
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


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    sys.exit(main())
