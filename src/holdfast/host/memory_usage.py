"""Reads the memory limit and usage of this machine and of this process's cgroups (v1 or v2).

watch/memory_pressure.py reports when memory is nearly used up; agent/oom.py proves that a process was killed for it.
"""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from holdfast.host.cgroups import memory_group


class MemoryUsage(Struct, frozen=True, kw_only=True):
    """A memory limit, and how much of it is in use and not reclaimable."""

    where: str
    used_bytes: int
    limit_bytes: int
    stalled: float = 0.0
    """Percentage of the last ten seconds in which every process waited for memory, if the kernel reports it."""

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def used_fraction(self) -> float:
        return self.used_bytes / self.limit_bytes


def memory_usages(root: Path = Path("/")) -> list[MemoryUsage]:
    """The usage of the machine, and of each cgroup of this process that has a lower limit."""
    machine = _machine(root)
    group = memory_group(root)
    if group is None:
        return [machine]
    mount = root / "sys/fs/cgroup"
    above = [folder for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return [
        machine,
        *(one for one in map(cgroup_usage, above) if one is not None and one.limit_bytes < machine.limit_bytes),
    ]


def _machine(root: Path) -> MemoryUsage:
    words = dict(re.findall(r"^(\w+): +(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE))
    total, available = (int(words[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return MemoryUsage(where="this machine", used_bytes=total - available, limit_bytes=total)


def cgroup_usage(folder: Path) -> MemoryUsage | None:
    """A cgroup's usage; None if it has no limit."""
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
        return MemoryUsage(
            where=str(folder),
            used_bytes=max(0, in_use - int(stat.get(idle, "0"))),
            limit_bytes=max(1, int(allowed)),
            stalled=_stall_percent(folder / "memory.pressure"),
        )
    except (OSError, ValueError):
        return None


def _stall_percent(path: Path) -> float:
    # full avg10=23.41 avg60=8.02 avg300=1.93 total=5123456
    try:
        match = re.search(r"^full avg10=([\d.]+)", path.read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return float(match[1]) if match else 0.0
