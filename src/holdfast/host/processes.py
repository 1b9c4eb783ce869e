"""Finds and kills processes of this machine, by descent or by holdfast's environment variables.

Linux only: it reads /proc. A process counts as holdfast's if it descends from a given one, or if its environment has a
holdfast variable, which it keeps even after it has daemonised itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from holdfast.host.files import read_object

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_KTHREAD = 0x200000
_EXEC_POLLS, _EXEC_POLL_S = 10, 0.001
_MAX_PID = 1 << 22
"""More than Linux ever numbers processes."""
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessId(Struct, frozen=True):
    """A process that cannot be confused with a later one of the same pid; `started` is in clock ticks since boot."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return started_at(self.pid) == self.started


def read_process_id(record: Path) -> ProcessId | None:
    """The process that a file names by `pid` and `started`; None if it names none."""
    try:
        found = read_object(record)
    except OSError:
        return None
    pid, started = found.get("pid"), found.get("started")
    if not isinstance(pid, int) or not isinstance(started, int) or not 0 < pid < _MAX_PID:
        return None
    return ProcessId(pid, started)


def machine_id() -> dict[str, str]:
    """Identifies this machine by `hostname` and `boot`; the latter may be empty."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return {"hostname": socket.gethostname(), "boot": boot}


def identify(pid: int) -> ProcessId | None:
    """The identity of a live process; None if there is none."""
    started = started_at(pid)
    return None if started is None else ProcessId(pid, started)


def started_at(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def state_letter(pid: int) -> str:
    """The kernel's letter for a process's state (R, S, D, T, Z); empty if it is gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def cpu_wait_s(pid: int) -> float:
    """Seconds that a process's main thread was runnable but waited for a CPU; 0 if the kernel does not report it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; the name before it may hold spaces and brackets."""
    try:
        # Of every process, several times a second: without a Path and a decoder it takes half the time.
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read()
    except OSError:
        return None
    return text[text.rindex(b")") + 2 :].decode().split()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; called in the child between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Have orphaned descendants become children of this process rather than of init."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def all_pids() -> Iterator[int]:
    """Every visible process."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            yield int(name)


def children(parent: int) -> list[int]:
    """Live children of a process."""
    return _by_parent().get(parent, [])


def _by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for pid in all_pids():
        fields = _stat(pid)
        if fields and fields[0] not in ("Z", "X"):
            found.setdefault(int(fields[1]), []).append(pid)
    return found


def descendants(root: int) -> list[int]:
    """Live descendants of a process, parents before children, without itself."""
    by_parent = _by_parent()
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = by_parent.get(waiting.pop(), [])
        found.extend(below)
        waiting.extend(below)
    return found


def by_env(pids: Iterable[int], **marks: str) -> list[int]:
    """The processes whose environment has all of these variables."""
    wanted = [f"{name}={value}".encode() for name, value in marks.items()]
    found: list[int] = []
    for pid in pids:
        environ = _environ(pid)
        if all(mark in environ for mark in wanted):
            found.append(pid)
    return found


def by_env_prefix(pids: Iterable[int], **marks: str) -> list[int]:
    """The processes whose environment has all of these variables, with values that start with the given ones."""
    wanted = [f"{name}={value}".encode() for name, value in marks.items()]
    return [pid for pid in pids if _has_prefixes(_environ(pid), wanted)]


def _has_prefixes(environ: list[bytes], wanted: list[bytes]) -> bool:
    return all(any(word.startswith(mark) for word in environ) for mark in wanted)


def by_process_group(pids: Iterable[int], groups: Container[int]) -> list[int]:
    """The processes that are in one of these process groups."""
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[2]) in groups]


HELPER = "HOLDFAST_HELPER"
"""Environment variable of processes that holdfast starts in a separate session next to the ranks."""


def strays(pids: Sequence[int], *, own: Container[int], known: Iterable[str], since: int = 0) -> list[int]:
    """The processes that no session or variable attributes, even with an emptied environment.

    They have left every session in `own`, have none of the `known` variables, share no session with a process that has
    one, and started at `since` or later (clock ticks since boot). No process can enter another one's session.
    """
    accounted: set[int] = set()
    others: list[tuple[int, int]] = []
    for pid in pids:
        fields = _stat(pid)
        if fields is None or int(fields[3]) in own:
            continue
        session = int(fields[3])
        if with_env_names((pid,), *known):
            accounted.add(session)
        elif int(fields[19]) >= since:
            others.append((pid, session))
    return [pid for pid, session in others if session not in accounted]


def with_env_names(pids: Iterable[int], *names: str) -> list[int]:
    """The processes whose environment has one of these variables."""
    prefixes = tuple(f"{name}=".encode() for name in names)
    return [pid for pid in pids if any(entry.startswith(prefixes) for entry in _environ(pid))]


def by_session(pids: Iterable[int], sessions: Container[int]) -> list[int]:
    """The processes that are in one of these sessions."""
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[3]) in sessions]


def boot_ticks() -> int:
    """The time now in clock ticks since boot, as `started_at` counts it."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def command_line(pid: int) -> str:
    """A process's command line, at most 200 characters; its bare name if it has none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        words = words.strip() or Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:
        return "gone"
    return " ".join(words.decode(errors="replace").split())[:200]


def _environ(pid: int) -> list[bytes]:
    """The environment a process was started with; empty if it is gone or another user's.

    During an exec it reads as empty for a moment; retrying keeps marked processes from being missed.
    """
    for _ in range(_EXEC_POLLS):
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:  # in half the time of a Path
                environ = file.read()
        except OSError:
            return []
        if environ or not _runs_a_program(pid):
            return environ.split(b"\0")
        time.sleep(_EXEC_POLL_S)
    return []


def _runs_a_program(pid: int) -> bool:
    """Whether it is neither gone, a zombie nor a kernel thread."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in ("Z", "X") and not int(fields[6]) & _PF_KTHREAD


def send_signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False if the process is gone or another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 64` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def port_owner(port: int) -> str:
    """The owner of a TCP port of this network namespace, as `process 42 (python)`; empty if the port is free.

    `an unknown process` if /proc does not show it.
    """
    wanted = {inode for inode, number in _sockets("self").items() if number == port}
    if not wanted:
        return ""
    for pid in all_pids():
        if wanted & open_sockets(pid):
            with contextlib.suppress(OSError):
                return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return "an unknown process"


def listening_ports(pid: int) -> list[int]:
    """The TCP ports that a process listens on; empty if /proc does not show them."""
    listening = _sockets(str(pid), states=("0A",))
    return sorted({listening[inode] for inode in listening.keys() & open_sockets(pid)})


def is_networked_with(pid: int, port: int) -> bool:
    """Whether a process listens on any TCP port or is connected to this one; also true if /proc does not show it."""
    own = open_sockets(pid)
    found = _sockets(str(pid), states=("0A",)).keys() | {
        inode for inode, peer in _sockets(str(pid), end=_REMOTE).items() if peer == port
    }
    return not own or bool(own & found)


_LOCAL, _REMOTE = 1, 2
"""Columns of /proc/net/tcp."""


def _sockets(pid: str, states: Container[str] | None = None, end: int = _LOCAL) -> dict[str, int]:
    """Ports of the TCP sockets in a process's network namespace, by their names in /proc/PID/fd."""
    found: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        for line in _lines(Path(f"/proc/{pid}/net/{table}"))[1:]:
            words = line.split()
            if states is None or words[3] in states:
                found[f"socket:[{words[9]}]"] = int(words[end].rpartition(":")[2], 16)
    return found


def open_sockets(pid: int) -> set[str]:
    """What a process has open, by the names in /proc/PID/fd, such as `socket:[4711]`; empty if /proc does not tell."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(descriptor.path))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def stop_processes(pids: Sequence[int], for_s: float | None = None) -> None:
    """Stop processes with SIGSTOP, possibly including this one; they resume after `for_s` seconds, or never."""
    if for_s is None:
        for pid in pids:
            send_signal(pid, signal.SIGSTOP)
        return
    # One process sends both signals, so that none is resumed before it is stopped, however late this process is.
    _start("sh", "-c", 'kill -STOP "$@"; sleep "$0"; kill -CONT "$@"', f"{for_s:.3f}", *map(str, pids))


@contextlib.contextmanager
def undo_later(delay_s: float | None, *argv: str) -> Generator[None]:
    """Run a command `delay_s` seconds after the block, even if this process is killed within it; never with None.

    The process that will run it starts before the block.
    """
    if delay_s is None:
        yield
        return
    helper = _start("sh", "-c", 'read _; sleep "$0" && exec "$@"', f"{delay_s:.3f}", *argv, stdin=subprocess.PIPE)
    assert helper.stdin is not None, "it is a pipe"
    with helper.stdin:  # `read` returns when it is closed
        yield


def _start(*argv: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one."""
    return subprocess.Popen(
        argv,
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {HELPER: "1"},
    )


def kill_all(find: Callable[[], Iterable[int]], *, within_s: float) -> list[int]:
    """Kill what `find` returns until it returns nothing; returns what is stuck in the kernel at the timeout."""
    deadline = time.monotonic() + within_s
    while pids := [pid for pid in find() if send_signal(pid, signal.SIGKILL)]:
        if time.monotonic() >= deadline:
            return pids
        wait_for_end(pids, deadline)
        reap(pids)
    return []


def reap(pids: Iterable[int]) -> None:
    """Reap those that are children of this process, including adopted orphans; a zombie keeps its pid."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


def wait_for_end(pids: Iterable[int], deadline: float) -> None:
    """Wait until all of these have ended, or until the deadline (monotonic seconds)."""
    poll = select.poll()
    waiting: set[int] = set()
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            continue
        waiting.add(descriptor)
        poll.register(descriptor, select.POLLIN)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left_s * 1000):
            poll.unregister(descriptor)
            waiting.discard(descriptor)
            os.close(descriptor)
    for descriptor in waiting:
        os.close(descriptor)
