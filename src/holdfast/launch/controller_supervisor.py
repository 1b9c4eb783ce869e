"""Owns a controller's life: started again whenever it dies, ended when its beat stops, found at the same address.

What holds the sockets that the controller listens on is a supervisor, one for each kind of place (local/local_supervisor.py,
kubernetes/incluster/pod_supervisor.py). Standard library only: it must start in milliseconds and never fail.
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

from holdfast.host.files import UnexpectedFile, atomic_write, read_object, regular_opener
from holdfast.host.processes import machine_id, port_owner
from holdfast.run_dir import SUPERSEDED_EXIT_CODE, RunDir

STABLE_AFTER_S = 10.0
"""A controller that lived longer did its work; what ended it is not likely to end the next one at once."""
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
DEFAULT_GRACE_S = 1800.0
"""`recovery.controller_grace_s` of a job that names none."""
HEARTBEAT_POLL_S = 5.0
MISSED_POLLS = 3
"""Looks at a controller without a beat before it is ended: several short ones rather than a long one, because after a
pause of the whole machine the first look finds nothing."""
MISSED_POLLS_AT_START = 24
"""Until its first beat it imports and folds its log, which takes longer on a slow disk."""
LOCK_ATTEMPTS = 50
_ID = secrets.token_hex(8)
"""Names this supervisor among all that a run ever has, on whatever machine."""


def lock_run(folder: RunDir) -> int | None:
    """Take the run's lock; whoever merely looks at it holds it for some microseconds, so one refusal is not the end."""
    for _ in range(LOCK_ATTEMPTS):
        if (lock := folder.lock()) is not None:
            return lock
        time.sleep(0.01)
    return None


@contextlib.contextmanager
def listen(folder: RunDir, address: str, port: int = 0) -> Generator[tuple[socket.socket, socket.socket]]:
    """Listen for agents (TCP) and for this user (Unix).

    The port is the one that is asked for, or that of an earlier supervisor; where another has it by now it is any: agents
    read where the controller is before they connect.
    """
    former: int = port or folder.read_controller_record().get("port", 0)
    taken_by = ""
    try:
        agents = socket.create_server((address, former), backlog=4096)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # the second where the record names one of root's
            raise
        taken_by = port_owner(former) or "somebody who has let it go by now"
        agents = socket.create_server((address, 0), backlog=4096)
    clients = listen_for_clients(folder)
    host, port = agents.getsockname()[:2]
    description = {"host": host, "port": port}
    if taken_by:
        description |= {"former_port": former, "taken_by": taken_by}
    write_controller_record(folder, **description)
    with agents, clients:
        yield agents, clients


def listen_for_clients(folder: RunDir) -> socket.socket:
    """Listen for this user's commands."""
    directory = os.open(folder.path, os.O_PATH | os.O_DIRECTORY)
    folder.control_socket.unlink(missing_ok=True)
    clients = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Through /proc the path stays short however deep the folder lies; a Unix socket's path holds 107 bytes.
    clients.bind(f"/proc/self/fd/{directory}/{folder.control_socket.name}")
    clients.listen(128)
    os.close(directory)
    return clients


def write_controller_record(folder: RunDir, **found: Any) -> None:
    """Say that this process is the run's supervisor, on which machine, and where agents find its controller.

    Of a controller that does not last it says `failed`, how many in a row, and `failing_since` when.
    """
    atomic_write(
        folder.controller_record,
        json.dumps({**found, "supervisor_pid": os.getpid(), "id": _ID, **machine_id()}).encode(),
    )


@dataclass(frozen=True, kw_only=True)
class RestartBackoff:
    """When to start the next controller: at once at first, then ever later, so that a full disk does not end a run."""

    grace_s: float
    """Seconds in which no controller lasts before the run is given up."""
    failures: int = 0
    """Controllers in a row that did not last."""
    failing_since: float = 0.0
    """When the first of those ended."""

    def after_exit(self, started: float, ended: float) -> RestartBackoff:
        """The pace once another controller has lived from `started` to `ended` (monotonic seconds)."""
        if ended - started > STABLE_AFTER_S:
            return RestartBackoff(grace_s=self.grace_s)
        return RestartBackoff(
            grace_s=self.grace_s,
            failures=self.failures + 1,
            failing_since=self.failing_since if self.failures else ended,
        )

    @property
    def delay_s(self) -> float:
        """Least time from the start of one controller to that of the next."""
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.failures - 3)) if self.failures > 2 else 0.0

    def gave_up(self, now: float) -> bool:
        return self.failures > 1 and now - self.failing_since >= self.grace_s


def supervise(folder: RunDir, agents: socket.socket, clients: socket.socket, lock: int) -> int:
    """Have a controller alive until the run is over; its last exit code."""
    pace = RestartBackoff(grace_s=_grace_s(folder))
    while True:
        if not _still_owner(folder, agents):
            return SUPERSEDED_EXIT_CODE
        started = time.monotonic()
        status = _run_controller(folder, agents, clients, lock)
        ended = time.monotonic()
        pace = pace.after_exit(started, ended)
        if status in (0, SUPERSEDED_EXIT_CODE) or pace.gave_up(ended):
            return status
        if pace.failures > 1 and status > 0:  # one that somebody killed may have worked
            _record_failures(folder, failed=pace.failures, failing_since=time.time() - (ended - pace.failing_since))
        time.sleep(max(0.0, pace.delay_s - (ended - started)))


def _still_owner(folder: RunDir, agents: socket.socket) -> bool:
    """Whether no other supervisor has written itself down: a file system without locks lets two believe they have one.

    A record that names nobody is damaged, and is written anew.
    """
    found = folder.read_controller_record()
    if "id" in found:
        return found["id"] == _ID
    host, port = agents.getsockname()[:2]
    with contextlib.suppress(OSError):
        write_controller_record(folder, host=host, port=port)
    return True


def _record_failures(folder: RunDir, **failing: Any) -> None:
    """Write down whether controllers last, for whoever asks how the run is; without `failing`, they do."""
    found = folder.read_controller_record()
    if found.get("id") == _ID:
        kept = {name: value for name, value in found.items() if name not in ("failed", "failing_since")}
        if kept | failing != found:
            with contextlib.suppress(OSError):
                write_controller_record(folder, **(kept | failing))


def _grace_s(folder: RunDir) -> float:
    """The job's `recovery.controller_grace_s`; the default of a job that names none, or cannot be read."""
    try:
        found: Any = read_object(folder.job)["job"]["recovery"]["controller_grace_s"]
    except (OSError, LookupError, TypeError):
        return DEFAULT_GRACE_S
    return float(found) if isinstance(found, (int, float)) and found > 0 else DEFAULT_GRACE_S


def _run_controller(folder: RunDir, agents: socket.socket, clients: socket.socket, lock: int) -> int:
    """Start a controller and return its exit code when it has ended."""
    heartbeats, heartbeat = os.pipe()
    handed_down = (agents.fileno(), clients.fileno(), heartbeat)
    argv = [sys.executable, "-m", "holdfast.controller_main", str(folder.path), *map(str, handed_down)]
    if folder.secrets_dir is not None:
        argv.append(str(folder.secrets_dir))
    try:
        with _open_log(folder) as log:
            controller = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(*handed_down, lock)
            )
    except OSError as error:  # no more processes, memory or open files; there may be soon
        _log_line(f"no controller could be started: {error}")
        os.close(heartbeats)
        return os.EX_OSERR
    finally:
        os.close(heartbeat)
    try:
        return _watch(controller.pid, heartbeats, on_stable=lambda: _record_failures(folder))
    finally:
        os.close(heartbeats)


def _open_log(folder: RunDir) -> BinaryIO:
    """Where the controller writes; nowhere, where its log is no file."""
    try:
        return open(folder.controller_log, "ab", opener=regular_opener)
    except UnexpectedFile:
        return open(os.devnull, "ab")


def _log_line(what: str) -> None:
    """Leave a line in the controller's log, unless the disk is full."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{what}\n".encode())


def _watch(controller: int, heartbeats: int, on_stable: Callable[[], None]) -> int:
    """Wait for a controller's end, and bring it about when it has been silent for too long; reap whatever else ends.

    Calls `lasts` once it has lived for so long that it can be taken to work.
    """
    until, stable = time.monotonic() + STABLE_AFTER_S, False
    poll = select.poll()
    poll.register(heartbeats, select.POLLIN)
    silent, allowed = 0, MISSED_POLLS_AT_START
    while True:
        if poll.poll(HEARTBEAT_POLL_S * 1000):
            if not os.read(heartbeats, 4096):
                # It has closed its end, which only its own end does.
                return _wait_for(controller)
            silent, allowed = 0, MISSED_POLLS
            if not stable and time.monotonic() >= until:
                stable = True
                on_stable()
        else:
            silent += 1
        if silent >= allowed:
            _log_line(f"the controller {controller} was silent for {silent * HEARTBEAT_POLL_S:g} s; it is ended")
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
