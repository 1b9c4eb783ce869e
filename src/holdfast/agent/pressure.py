"""Owns the warning that a node's memory is nearly used up, given before the kernel ends a rank for it.

Reads what the node's cgroup (v1 or v2) may use and uses, of it and of those above it the one nearest to its limit;
without a limit, the machine's own figures. Refuses to own the proof that a process was ended for memory (memory.py).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.findings import Finding, Severity
from holdfast.host.cgroups import memory_group
from holdfast.host.processes import command_of, descendants

LOOK_S = 2.0
"""Seconds between two looks."""

NEARLY = 0.92
"""Part of the memory in use from which on it is told."""

STALLED = 20.0
"""Per cent of the last ten seconds in which every process waited for memory, from which on it is told."""

RELIEF = 0.85
"""Part in use below which it may be told again."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How much memory there is, and how much of it is in use that cannot be dropped."""

    where: str
    used_bytes: int
    limit_bytes: int
    stalled: float = 0.0
    """Per cent of the last ten seconds in which every process waited for memory, where the kernel tells."""

    @property
    def part(self) -> float:
        return self.used_bytes / self.limit_bytes


async def watch(where: str, find: Callable[[Finding], None]) -> None:
    """Look for ever, and say when memory is short: once until there is relief."""
    told = False
    while True:
        reading = read()
        short = reading.part >= NEARLY or reading.stalled >= STALLED
        if short and not told:
            find(_finding(reading, where))
        told = short or (told and reading.part > RELIEF)
        await asyncio.sleep(LOOK_S)


def read(root: Path = Path("/")) -> Reading:
    """The tightest limit that this process and its children are under."""
    machine = _machine(root)
    group = memory_group(root)
    if group is None:
        return machine
    mount = root / "sys/fs/cgroup"
    above = [folder for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    readings = [one for one in map(of_group, above) if one is not None and one.limit_bytes < machine.limit_bytes]
    return max((machine, *readings), key=lambda one: (one.stalled >= STALLED, one.part))


def _machine(root: Path) -> Reading:
    words = dict(re.findall(r"^(\w+): +(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE))
    total, available = (int(words[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return Reading(where="this machine", used_bytes=total - available, limit_bytes=total)


def of_group(folder: Path) -> Reading | None:
    """A cgroup's reading; None where it has no limit of its own."""
    second = (folder / "memory.current").is_file()
    used, limit, idle = (
        ("memory.current", "memory.max", "inactive_file")
        if second
        else ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")
    )
    try:
        in_use, allowed = int((folder / used).read_text()), (folder / limit).read_text().strip()
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        if allowed == "max":
            return None
        return Reading(
            where=str(folder),
            used_bytes=max(0, in_use - int(stat.get(idle, "0"))),
            limit_bytes=max(1, int(allowed)),
            stalled=_stalled(folder / "memory.pressure"),
        )
    except (OSError, ValueError):
        return None


def _stalled(path: Path) -> float:
    # full avg10=23.41 avg60=8.02 avg300=1.93 total=5123456
    try:
        match = re.search(r"^full avg10=([\d.]+)", path.read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return float(match[1]) if match else 0.0


def _finding(reading: Reading, where: str) -> Finding:
    stalled = f"; every process waited for memory {reading.stalled:.0f} % of the time" if reading.stalled else ""
    return Finding(
        code="memory-pressure",
        severity=Severity.WARNING,
        what=f"{_gib(reading.used_bytes)} of {_gib(reading.limit_bytes)} of memory are in use{stalled}; "
        "the kernel ends a rank when none is left",
        where=where,
        evidence=(f"limit of {reading.where}", *_largest()),
        remedy="Use less memory (fewer DataLoader workers, less pinned memory), or ask for more: `resources.memory`.",
    )


def _largest() -> tuple[str, ...]:
    """The three largest processes of this node, as lines of evidence."""
    sizes = sorted(((_resident_bytes(pid), pid) for pid in descendants(os.getpid())), reverse=True)
    return tuple(f"process {pid}: {_gib(size)}: {command_of(pid)}" for size, pid in sizes[:3] if size)


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
