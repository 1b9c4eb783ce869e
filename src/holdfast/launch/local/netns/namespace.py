"""Creates, pins, enters and removes Linux namespaces, and lists their processes.

A pinned node is a folder with two files, `net` and `uts`, each a bind mount of a namespace. A mount namespace cannot
be pinned there: the kernel refuses to propagate one, and the pins must propagate (see the package docstring).
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner

# From linux/sched.h and linux/mount.h; os.unshare and os.setns exist only from Python 3.12 on.
NEW_MOUNT, NEW_UTS, NEW_USER, NEW_NET = 0x00020000, 0x04000000, 0x10000000, 0x40000000
_MS_BIND, _MS_SHARED, _MNT_DETACH = 1 << 12, 1 << 20, 2

_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21


def privileged() -> bool:
    """Whether this process may create namespaces and interfaces: as root, or inside a user namespace."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split(maxsplit=1)[0], 16)
    return bool(effective >> _CAP_NET_ADMIN & effective >> _CAP_SYS_ADMIN & 1)


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces."""
    _libc("unshare", flags)


def join(namespace: Path, kind: int) -> None:
    """Move the calling thread into a namespace."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _libc("setns", descriptor, kind)
    finally:
        os.close(descriptor)


def mount_shared_tmpfs(folder: Path) -> None:
    """Mount a tmpfs whose mounts and unmounts propagate to copies in other mount namespaces."""
    _libc("mount", b"holdfast", os.fsencode(folder), b"tmpfs", 0, b"mode=0700")
    _libc("mount", None, os.fsencode(folder), None, _MS_SHARED, None)


def unmount(target: Path) -> None:
    """Unmount lazily: processes that use the mount keep it. A target that is no mount is ignored."""
    with suppress(OSError):
        _libc("umount2", os.fsencode(target), _MNT_DETACH)


def pin(folder: Path, hostname: str) -> None:
    """Create a network and a UTS namespace, and a folder whose `net` and `uts` keep them alive."""
    folder.mkdir()
    errors: list[OSError] = []

    def make() -> None:
        try:
            unshare(NEW_NET | NEW_UTS)
            socket.sethostname(hostname)
            for kind in ("net", "uts"):
                (folder / kind).touch()
                source = f"/proc/thread-self/ns/{kind}".encode()
                _libc("mount", source, os.fsencode(folder / kind), None, _MS_BIND, None)
        except OSError as error:
            errors.append(error)

    # Namespaces belong to a thread: a short-lived thread creates them, and this process stays in its own.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def unpin(folder: Path) -> None:
    """Release the namespaces of a folder and remove it; missing parts are ignored."""
    for kind in ("net", "uts"):
        unmount(folder / kind)
    shutil.rmtree(folder, ignore_errors=True)


def enter_prefix(folder: Path) -> tuple[str, ...]:
    """The prefix that runs a command in a folder's namespaces; it adds about 2 ms."""
    return ("nsenter", f"--net={folder / 'net'}", f"--uts={folder / 'uts'}", "--")


def processes_in(*folders: Path) -> list[int]:
    """The processes in the network namespace of one of these folders."""
    networks = {identity for folder in folders if (identity := _namespace_id(folder / "net"))}
    return [pid for pid in processes() if _namespace_id(Path(f"/proc/{pid}/ns/net")) in networks]


def processes() -> Iterator[int]:
    """Every process except this one."""
    own = os.getpid()
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own)


def kill(find: Callable[[], list[int]], deadline_s: float = 10.0) -> None:
    """Kill what `find` returns until it returns nothing, so that processes forked meanwhile die too."""
    deadline = time.monotonic() + deadline_s
    while pids := find():
        if time.monotonic() > deadline:
            raise failure(
                "netns-processes-not-exiting",
                f"processes of a node are still there {deadline_s:g} s after SIGKILL",
                exit_code=ExitCode.CANNOT_RUN_HERE,
                evidence=tuple(f"process {pid}" for pid in pids),
                remedy="See /proc/PID/stack for what the kernel has them wait for.",
                owner=Owner.CLUSTER,
            )
        dying = [descriptor for pid in pids if (descriptor := _kill(pid)) is not None]
        for descriptor in dying:
            _wait(descriptor, deadline)


def _kill(pid: int) -> int | None:
    """Kill a process; the returned descriptor becomes readable when it is dead."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    return descriptor


def _wait(descriptor: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
    os.close(descriptor)


def _namespace_id(namespace: Path) -> tuple[int, int] | None:
    """A namespace's identity; None if it does not exist or may not be read."""
    try:
        status = namespace.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _libc(function: str, *arguments: int | bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    typed = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    if getattr(libc, function)(*typed) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
