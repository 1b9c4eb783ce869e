"""Names the system call in which a process sleeps, and what it is called on.

A stack of Python frames ends where C begins. The kernel knows the rest at no cost: /proc/PID/syscall has the number and
the arguments of the call that the main thread sleeps in, and reading it does not pause the process.
"""

from __future__ import annotations

import os
import platform

from holdfast.host.processes import state_letter
from holdfast.host.tcp_sockets import Endpoint, tcp_sockets

# By name: the number on x86-64 and on aarch64 (None: the call is not there), and whether the first argument is a file.
_CALLS: dict[str, tuple[int | None, int | None, bool]] = {
    "read": (0, 63, True),
    "write": (1, 64, True),
    "poll": (7, None, False),
    "ioctl": (16, 29, True),
    "pread64": (17, 67, True),
    "pwrite64": (18, 68, True),
    "readv": (19, 65, True),
    "writev": (20, 66, True),
    "select": (23, None, False),
    "nanosleep": (35, 101, False),
    "connect": (42, 203, True),
    "accept": (43, 202, True),
    "sendto": (44, 206, True),
    "recvfrom": (45, 207, True),
    "sendmsg": (46, 211, True),
    "recvmsg": (47, 212, True),
    "wait4": (61, 260, False),
    "fcntl": (72, 25, True),
    "flock": (73, 32, True),
    "fsync": (74, 82, True),
    "fdatasync": (75, 83, True),
    "ftruncate": (77, 46, True),
    "futex": (202, 98, False),
    "getdents64": (217, 61, True),
    "clock_nanosleep": (230, 115, False),
    "epoll_wait": (232, None, False),
    "waitid": (247, 95, False),
    "openat": (257, 56, False),
    "newfstatat": (262, 79, False),
    "pselect6": (270, 72, False),
    "ppoll": (271, 73, False),
    "epoll_pwait": (281, 22, False),
    "fallocate": (285, 47, True),
    "accept4": (288, 242, True),
    "statx": (332, 291, False),
}
_COLUMNS = {"x86_64": 0, "aarch64": 1}
_HINTS = {
    "futex": "a lock, or another thread",
    "wait4": "a child process",
    "waitid": "a child process",
    "nanosleep": "a sleep",
    "clock_nanosleep": "a sleep",
}
MAX_TARGET = 200
"""Most characters of a file's path."""


def system_call(pid: int) -> str:
    """The call in which a process's main thread sleeps, such as `read of /data/shard-7`.

    Empty if it computes, is gone, or the kernel does not let this process look (as for ptrace). A call that waits for a
    device or a network file system also has the kernel's function: `(in the kernel: nfs_wait_bit_killable)`.
    """
    words = _read(pid, "syscall").split()
    if len(words) < 2 or not words[0].isdecimal():  # `running`, or -1 for none
        return ""
    name, on_file = _named(int(words[0]), _COLUMNS.get(platform.machine()))
    target = _file(pid, int(words[1], 16)) if on_file else _HINTS.get(name, "")
    call = name if not target else f"{name} of {target}" if on_file else f"{name} ({target})"
    function = _read(pid, "wchan") if state_letter(pid) == "D" else ""
    return f"{call} (in the kernel: {function})" if function not in ("", "0") else call


def _named(number: int, column: int | None) -> tuple[str, bool]:
    for name, (x86_64, aarch64, on_file) in _CALLS.items():
        if column is not None and (x86_64, aarch64)[column] == number:
            return name, on_file
    return f"system call {number}", False


def _file(pid: int, descriptor: int) -> str:
    """What a descriptor is open on: a path, or the other end of a connection."""
    try:
        opened = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""
    if not opened.startswith("socket:["):
        return opened if len(opened) <= MAX_TARGET else f"…{opened[-MAX_TARGET:]}"
    remote = _remote(int(opened[len("socket:[") : -1]))
    return f"a connection to {remote.host}:{remote.port}" if remote else "a socket"


def _remote(inode: int) -> Endpoint | None:
    try:
        sockets = tcp_sockets()
    except OSError:
        return None
    return next((each.remote for each in sockets if each.inode == inode and not each.listening), None)


def _read(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}") as file:
            return file.read().strip()
    except OSError:
        return ""
