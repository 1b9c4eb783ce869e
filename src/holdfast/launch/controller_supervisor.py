"""Restarts a controller whenever it dies, and kills it when its heartbeat stops.

Each kind of target has a supervisor (local/local_supervisor.py, kubernetes/incluster/pod_supervisor.py). It owns the
sockets that the controller listens on, so the address stays the same. Standard library only: a supervisor must start
in milliseconds and never fail.

The next controller (control/controller.py) replays the log in `Controller.__init__`: each event changes the state, and
the commands that would follow are dropped; `_track` rebuilds each source's last message and the written steps.
`controller_started` (control/node_handlers.py) and each agent that reconnects then repeat what may be lost; agents
resend messages that were not acknowledged.
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
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

from holdfast.errors import ExitCode
from holdfast.host.files import UnexpectedFile, atomic_write, read_object, regular_opener
from holdfast.host.processes import machine_id, port_owner
from holdfast.launch.waiting_controller import CONTROLLER, WaitingController, listen_for_agents
from holdfast.run_dir import RunDir

STABLE_AFTER_S = 10.0
"""A controller that ran longer counts as stable; whatever ended it is unlikely to end the next one immediately."""
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
DEFAULT_GRACE_S = 1800.0
"""`recovery.controller_grace_s` of a job that sets none."""
HEARTBEAT_POLL_S = 5.0
MISSED_POLLS = 3
"""Polls without a heartbeat before the controller is killed. Several short polls rather than one long one: after a
pause of the whole machine the first poll finds no heartbeat."""
MISSED_POLLS_AT_START = 24
"""The same until the first heartbeat: the controller imports and replays its log, slowly on a slow disk."""
LOCK_ATTEMPTS = 50
_ID = secrets.token_hex(8)
"""Identifies this supervisor among all supervisors of a run, on any machine."""


def lock_run(folder: RunDir) -> int | None:
    """Take the run's lock; retries, because a process that only tests the lock holds it for some microseconds."""
    for _ in range(LOCK_ATTEMPTS):
        if (lock := folder.lock()) is not None:
            return lock
        time.sleep(0.01)
    return None


@contextlib.contextmanager
def listen(
    folder: RunDir, address: str, port: int = 0, *, agents: socket.socket | None = None
) -> Generator[tuple[socket.socket, socket.socket]]:
    """Listen for agents (TCP) and for this user's commands (Unix).

    The port is `port`, or that of an earlier supervisor; if another process has it by now, any free port. Agents read
    the controller's address before they connect. `agents` is used instead if it listens at the address and no port is
    preferred.
    """
    former: int = port or folder.read_controller_record().get("port", 0)
    taken_by = ""
    if agents is not None and (former or agents.getsockname()[0] != address):
        agents.close()
        agents = None
    try:
        agents = agents or listen_for_agents(address, former)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # EACCES if the record names a privileged port
            raise
        taken_by = port_owner(former) or "a process that has released it by now"
        agents = listen_for_agents(address)
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
    return listen_unix(folder.control_socket)


def listen_unix(path: Path) -> socket.socket:
    """Listen on a Unix socket in a private folder, in place of an earlier one."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    path.unlink(missing_ok=True)
    clients = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Through /proc the path stays short for any folder depth; a Unix socket's path holds 107 bytes.
    clients.bind(f"/proc/self/fd/{directory}/{path.name}")
    clients.listen(128)
    os.close(directory)
    return clients


def write_controller_record(folder: RunDir, **found: Any) -> None:
    """Record that this process is the run's supervisor, its machine, and the controller's address.

    For a controller that keeps failing, `failed` is the number of failures in a row and `failing_since` their start.
    """
    atomic_write(
        folder.controller_record,
        json.dumps({**found, "supervisor_pid": os.getpid(), "id": _ID, **machine_id()}).encode(),
    )


class RestartBackoff(Struct, frozen=True, kw_only=True):
    """When to start the next controller: first immediately, then with growing delays, so a full disk ends no run."""

    grace_s: float
    """Seconds without a stable controller before the supervisor gives the run up."""
    failures: int = 0
    """Controllers in a row that ended before they were stable."""
    failing_since: float = 0.0
    """When the first of those ended."""

    def after_exit(self, started: float, ended: float) -> RestartBackoff:
        """The backoff after another controller has run from `started` to `ended` (monotonic seconds)."""
        if ended - started > STABLE_AFTER_S:
            return RestartBackoff(grace_s=self.grace_s)
        return RestartBackoff(
            grace_s=self.grace_s,
            failures=self.failures + 1,
            failing_since=self.failing_since if self.failures else ended,
        )

    @property
    def delay_s(self) -> float:
        """Least time from the start of one controller to the start of the next."""
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.failures - 3)) if self.failures > 2 else 0.0

    def gave_up(self, now: float) -> bool:
        return self.failures > 1 and now - self.failing_since >= self.grace_s


def supervise(
    folder: RunDir, agents: socket.socket, clients: socket.socket, lock: int, waiting: WaitingController | None = None
) -> int:
    """Keep a controller running, first `waiting`, until the run is over; returns the last exit code."""
    pace = RestartBackoff(grace_s=controller_grace_s(folder))
    while True:
        if not _still_owner(folder, agents):
            return ExitCode.SUPERSEDED
        started = time.monotonic()
        status = _run_controller(folder, agents, clients, lock, waiting)
        waiting = None
        ended = time.monotonic()
        pace = pace.after_exit(started, ended)
        if status in (0, ExitCode.SUPERSEDED) or pace.gave_up(ended):
            return status
        if pace.failures > 1 and status > 0:  # one that was killed may have been healthy
            _record_failures(folder, failed=pace.failures, failing_since=time.time() - (ended - pace.failing_since))
        time.sleep(max(0.0, pace.delay_s - (ended - started)))


def _still_owner(folder: RunDir, agents: socket.socket) -> bool:
    """Whether no other supervisor has recorded itself: without file locks two supervisors can believe they own the run.

    A record without an id is damaged, and is written again.
    """
    found = folder.read_controller_record()
    if "id" in found:
        return found["id"] == _ID
    host, port = agents.getsockname()[:2]
    with contextlib.suppress(OSError):
        write_controller_record(folder, host=host, port=port)
    return True


def _record_failures(folder: RunDir, **failing: Any) -> None:
    """Record for `holdfast status` that controllers keep failing; without `failing`, that they are stable."""
    found = folder.read_controller_record()
    if found.get("id") == _ID:
        kept = {name: value for name, value in found.items() if name not in ("failed", "failing_since")}
        if kept | failing != found:
            with contextlib.suppress(OSError):
                write_controller_record(folder, **(kept | failing))


def controller_grace_s(folder: RunDir) -> float:
    """The job's `recovery.controller_grace_s`; the default if the job sets none or cannot be read."""
    try:
        found: Any = read_object(folder.job)["job"]["recovery"]["controller_grace_s"]
    except (OSError, LookupError, TypeError):
        return DEFAULT_GRACE_S
    return float(found) if isinstance(found, (int, float)) and found > 0 else DEFAULT_GRACE_S


def _run_controller(
    folder: RunDir, agents: socket.socket, clients: socket.socket, lock: int, waiting: WaitingController | None
) -> int:
    """Run a controller, `waiting` if there is such, until it ends; returns its exit code."""
    heartbeats, heartbeat = os.pipe()
    handed_down = (agents.fileno(), clients.fileno(), heartbeat)
    own = () if folder.secrets_dir is None else (str(folder.secrets_dir),)
    try:
        with _open_log(folder) as log:
            process = waiting.begin(folder.path, handed_down, own, log, lock) if waiting else None
            process = process or subprocess.Popen(
                [sys.executable, "-m", CONTROLLER, str(folder.path), *map(str, handed_down), *own],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(*handed_down, lock),
            )
    except OSError as error:  # out of processes, memory or open files, perhaps only for a moment
        _log_line(f"no controller could be started: {error}")
        os.close(heartbeats)
        return os.EX_OSERR
    finally:
        os.close(heartbeat)
    try:
        return _watch(process.pid, heartbeats, on_stable=lambda: _record_failures(folder))
    finally:
        os.close(heartbeats)


def _open_log(folder: RunDir) -> BinaryIO:
    """The controller's log file; /dev/null if it is not a regular file."""
    try:
        return open(folder.controller_log, "ab", opener=regular_opener)
    except UnexpectedFile:
        return open(os.devnull, "ab")


def _log_line(what: str) -> None:
    """Write a line to the controller's log, unless the disk is full."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{what}\n".encode())


def _watch(controller: int, heartbeats: int, on_stable: Callable[[], None]) -> int:
    """Wait until the controller ends, kill it when it misses too many heartbeats, and reap all other children.

    Calls `on_stable` at the first heartbeat after STABLE_AFTER_S seconds.
    """
    until, stable = time.monotonic() + STABLE_AFTER_S, False
    poll = select.poll()
    poll.register(heartbeats, select.POLLIN)
    silent, allowed = 0, MISSED_POLLS_AT_START
    while True:
        if poll.poll(HEARTBEAT_POLL_S * 1000):
            if not os.read(heartbeats, 4096):
                # The pipe closes only when the controller ends.
                return _wait_for(controller)
            silent, allowed = 0, MISSED_POLLS
            if not stable and time.monotonic() >= until:
                stable = True
                on_stable()
        else:
            silent += 1
        if silent >= allowed:
            _log_line(f"the controller {controller} sent no heartbeat for {silent * HEARTBEAT_POLL_S:g} s; killing it")
            os.kill(controller, signal.SIGKILL)
            return _wait_for(controller)
        _reap_orphans(controller)


def _reap_orphans(controller: int) -> None:
    """Reap adopted processes, but not the controller, whose exit status is still needed."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != controller:
        os.waitpid(ended.si_pid, 0)


def _wait_for(controller: int) -> int:
    """Reap children until the controller ends."""
    while True:
        pid, status = os.wait()
        if pid == controller:
            return os.waitstatus_to_exitcode(status)
