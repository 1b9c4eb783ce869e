"""Owns a controller's life: started again whenever it dies, ended when its beat stops, found at the same address.

What holds the sockets that the controller listens on is a keeper, one for each kind of place (local/keeper.py,
kubernetes/keeper.py). Standard library only: it must start in milliseconds and never fail.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, BinaryIO

from holdfast.folder import SUPERSEDED_STATUS, RunFolder
from holdfast.host.files import UnexpectedFile, plain, put, read_object
from holdfast.host.processes import port_holder, this_machine

LASTING_S = 10.0
"""A controller that lived longer did its work; what ended it is not likely to end the next one at once."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
GRACE_S = 1800.0
"""`recovery.controller_grace_s` of a job that names none."""
LOOK_S = 5.0
SILENT_LOOKS = 3
"""Looks at a controller without a beat before it is ended: several short ones rather than a long one, because after a
pause of the whole machine the first look finds nothing."""
SILENT_LOOKS_AT_START = 24
"""Until its first beat it imports and folds its log, which takes longer on a slow disk."""
LOCK_TRIES = 50
_ID = secrets.token_hex(8)
"""Names this keeper among all that a run ever has, on whatever machine."""


def take(folder: RunFolder) -> int | None:
    """Take the run's lock; whoever merely looks at it holds it for some microseconds, so one refusal is not the end."""
    for _ in range(LOCK_TRIES):
        if (lock := folder.lock()) is not None:
            return lock
        time.sleep(0.01)
    return None


@contextlib.contextmanager
def listen(folder: RunFolder, address: str, port: int = 0) -> Generator[tuple[socket.socket, socket.socket]]:
    """Listen for agents (TCP) and for this user (Unix).

    The port is the one that is asked for, or that of an earlier keeper; where another has it by now it is any: agents
    read where the controller is before they connect.
    """
    former: int = port or folder.description().get("port", 0)
    taken_by = ""
    try:
        agents = socket.create_server((address, former), backlog=4096)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # the second where the record names one of root's
            raise
        taken_by = port_holder(former) or "somebody who has let it go by now"
        agents = socket.create_server((address, 0), backlog=4096)
    clients = clients_at(folder)
    host, port = agents.getsockname()[:2]
    description = {"host": host, "port": port}
    if taken_by:
        description |= {"former_port": former, "taken_by": taken_by}
    describe(folder, **description)
    with agents, clients:
        yield agents, clients


def clients_at(folder: RunFolder) -> socket.socket:
    """Listen for this user's commands."""
    directory = os.open(folder.path, os.O_PATH | os.O_DIRECTORY)
    folder.control_socket.unlink(missing_ok=True)
    clients = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Through /proc the path stays short however deep the folder lies; a Unix socket's path holds 107 bytes.
    clients.bind(f"/proc/self/fd/{directory}/{folder.control_socket.name}")
    clients.listen(128)
    os.close(directory)
    return clients


def describe(folder: RunFolder, **found: Any) -> None:
    """Say that this process is the run's keeper, on which machine, and where agents find its controller.

    Of a controller that does not last it says `failed`, how many in a row, and `failing_since` when.
    """
    put(folder.controller, json.dumps({**found, "keeper": os.getpid(), "id": _ID, **this_machine()}).encode())


@dataclass(frozen=True, kw_only=True)
class Pace:
    """When to start the next controller: at once at first, then ever later, so that a full disk does not end a run."""

    grace_s: float
    """Seconds in which no controller lasts before the run is given up."""
    quick: int = 0
    """Controllers in a row that did not last."""
    since: float = 0.0
    """When the first of those ended."""

    def after(self, started: float, ended: float) -> Pace:
        """The pace once another controller has lived from `started` to `ended` (monotonic seconds)."""
        if ended - started > LASTING_S:
            return Pace(grace_s=self.grace_s)
        return Pace(grace_s=self.grace_s, quick=self.quick + 1, since=self.since if self.quick else ended)

    @property
    def pause_s(self) -> float:
        """Least time from the start of one controller to that of the next."""
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self.quick - 3)) if self.quick > 2 else 0.0

    def hopeless(self, now: float) -> bool:
        return self.quick > 1 and now - self.since >= self.grace_s


def keep(folder: RunFolder, agents: socket.socket, clients: socket.socket, lock: int) -> int:
    """Have a controller alive until the run is over; its last exit code."""
    pace = Pace(grace_s=_grace_s(folder))
    while True:
        if not _ours(folder, agents):
            return SUPERSEDED_STATUS
        started = time.monotonic()
        status = _one_life(folder, agents, clients, lock)
        ended = time.monotonic()
        pace = pace.after(started, ended)
        if status in (0, SUPERSEDED_STATUS) or pace.hopeless(ended):
            return status
        if pace.quick > 1 and status > 0:  # one that somebody killed may have worked
            _say_how(folder, failed=pace.quick, failing_since=time.time() - (ended - pace.since))
        time.sleep(max(0.0, pace.pause_s - (ended - started)))


def _ours(folder: RunFolder, agents: socket.socket) -> bool:
    """Whether no other keeper has written itself down: a file system without locks lets two believe they have one.

    A record that names nobody is damaged, and is written anew.
    """
    found = folder.description()
    if "id" in found:
        return found["id"] == _ID
    host, port = agents.getsockname()[:2]
    with contextlib.suppress(OSError):
        describe(folder, host=host, port=port)
    return True


def _say_how(folder: RunFolder, **failing: Any) -> None:
    """Write down whether controllers last, for whoever asks how the run is; without `failing`, they do."""
    found = folder.description()
    if found.get("id") == _ID:
        kept = {name: value for name, value in found.items() if name not in ("failed", "failing_since")}
        if kept | failing != found:
            with contextlib.suppress(OSError):
                describe(folder, **(kept | failing))


def _grace_s(folder: RunFolder) -> float:
    """The job's `recovery.controller_grace_s`; the default of a job that names none, or cannot be read."""
    try:
        found: Any = read_object(folder.job)["job"]["recovery"]["controller_grace_s"]
    except (OSError, LookupError, TypeError):
        return GRACE_S
    return float(found) if isinstance(found, (int, float)) and found > 0 else GRACE_S


def _one_life(folder: RunFolder, agents: socket.socket, clients: socket.socket, lock: int) -> int:
    """Start a controller and return its exit code when it has ended."""
    beats, beat = os.pipe()
    handed_down = (agents.fileno(), clients.fileno(), beat)
    argv = [sys.executable, "-m", "holdfast.server", str(folder.path), *map(str, handed_down)]
    if folder.keys is not None:
        argv.append(str(folder.keys))
    try:
        with _log(folder) as log:
            controller = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(*handed_down, lock)
            )
    except OSError as error:  # no more processes, memory or open files; there may be soon
        _say(f"no controller could be started: {error}")
        os.close(beats)
        return os.EX_OSERR
    finally:
        os.close(beat)
    try:
        return _watch(controller.pid, beats, lasts=lambda: _say_how(folder))
    finally:
        os.close(beats)


def _log(folder: RunFolder) -> BinaryIO:
    """Where the controller writes; nowhere, where its log is no file."""
    try:
        return open(folder.controller_log, "ab", opener=plain)
    except UnexpectedFile:
        return open(os.devnull, "ab")


def _say(what: str) -> None:
    """Leave a line in the controller's log, unless the disk is full."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{what}\n".encode())


def _watch(controller: int, beats: int, lasts: Callable[[], None]) -> int:
    """Wait for a controller's end, and bring it about when it has been silent for too long; reap whatever else ends.

    Calls `lasts` once it has lived for so long that it can be taken to work.
    """
    until, lasting = time.monotonic() + LASTING_S, False
    poll = select.poll()
    poll.register(beats, select.POLLIN)
    silent, allowed = 0, SILENT_LOOKS_AT_START
    while True:
        if poll.poll(LOOK_S * 1000):
            if not os.read(beats, 4096):
                # It has closed its end, which only its own end does.
                return _wait_for(controller)
            silent, allowed = 0, SILENT_LOOKS
            if not lasting and time.monotonic() >= until:
                lasting = True
                lasts()
        else:
            silent += 1
        if silent >= allowed:
            _say(f"the controller {controller} was silent for {silent * LOOK_S:g} s; it is ended")
            os.kill(controller, signal.SIGKILL)
            return _wait_for(controller)
        _reap_orphans(controller)


def _reap_orphans(controller: int) -> None:
    """Take in the ends of adopted processes; not the controller's, which tells how it ended."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != controller:
        os.waitpid(ended.si_pid, 0)


def _wait_for(controller: int) -> int:
    """Reap whatever ends until the controller does."""
    while True:
        pid, status = os.wait()
        if pid == controller:
            return os.waitstatus_to_exitcode(status)
