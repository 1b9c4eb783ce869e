"""Finds evidence that the kernel killed a process for lack of memory.

cgroup v2: the `oom_kill` count in memory.events; v1: the one in memory.oom_control. A kill by the system-wide OOM
killer, outside any limit, is in the kernel log, where that is readable.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from msgspec import Struct

from holdfast.host.cgroups import KILL_COUNTERS, memory_group
from holdfast.host.kernel_log import kernel_records

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)

# [12345.678901] Out of memory: Killed process 4242 (python) total-vm:...
# [12345.678901] Memory cgroup out of memory: Killed process 4242 (python) total-vm:...
_KERNEL_LINE = re.compile(r"(?:Memory cgroup o|O)ut of memory: Kill(?:ed)? process (\d+)\b[^\n]*")


class OomSnapshot(Struct, frozen=True, kw_only=True):
    """State before a process started, to tell a later kill from an earlier one."""

    counter: Path | None
    kills: int
    since_us: int = 0
    """Microseconds since boot, as in the kernel log: earlier records are about another process."""


def oom_snapshot(root: Path = Path("/")) -> OomSnapshot:
    """Record the state of this process's memory cgroup, which its child processes share."""
    counter = _kill_counter(root)
    return OomSnapshot(counter=counter, kills=_kills(counter), since_us=time.monotonic_ns() // 1000)


def oom_evidence(before: OomSnapshot, pid: int) -> str:
    """Evidence that the kernel killed a process for memory; empty if there is none."""
    line = _kernel_line(pid, before.since_us)
    if line:
        return line
    if more := kills_since(before):
        return f"{before.counter}: oom_kill rose from {before.kills} to {before.kills + more}"
    return ""


def kills_since(before: OomSnapshot) -> int:
    """Number of OOM kills in the cgroup since the snapshot."""
    return max(0, _kills(before.counter) - before.kills)


def _kill_counter(root: Path) -> Path | None:
    """The file that counts OOM kills in this process's cgroup."""
    group = memory_group(root)
    return next((group / name for name in KILL_COUNTERS if (group / name).is_file()), None) if group else None


def _kills(counter: Path | None) -> int:
    if counter is None:
        return 0
    try:
        match = _COUNT.search(counter.read_text())
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _kernel_line(pid: int, since_us: int) -> str:
    """The kernel's last record about this pid since a time."""
    return next((line for text in reversed(kernel_records(since_us)) if (line := _kill_line(text, pid))), "")


def _kill_line(text: str, pid: int) -> str:
    """The part of a kernel record's text that reports the kill of a process."""
    match = _KERNEL_LINE.search(text)
    return match[0] if match is not None and int(match[1]) == pid else ""
