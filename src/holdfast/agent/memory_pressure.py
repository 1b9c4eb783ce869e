"""Warns that a node's memory is nearly used up, before the kernel kills a rank.

Of the limits that host/memory_usage.py reads, the one nearest to exhaustion counts. oom.py finds the evidence after a
kill.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from holdfast.findings import Finding, Severity
from holdfast.host.memory_usage import MemoryUsage, memory_usages
from holdfast.host.processes import command_line, descendants

POLL_S = 2.0
"""Seconds between two polls."""

HIGH_USE = 0.92
"""Fraction of memory in use from which the agent warns."""

HIGH_STALL_PERCENT = 20.0
"""Per cent of the last ten seconds in which all processes waited for memory, from which the agent warns."""

LOW_USE = 0.85
"""Fraction in use below which the agent may warn again."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


async def watch_memory(where: str, report_finding: Callable[[Finding], None]) -> None:
    """Poll forever and report memory pressure, once until it has eased."""
    reported = False
    while True:
        reading = read_tightest()
        short = reading.used_fraction >= HIGH_USE or reading.stalled >= HIGH_STALL_PERCENT
        if short and not reported:
            report_finding(_finding(reading, where))
        reported = short or (reported and reading.used_fraction > LOW_USE)
        await asyncio.sleep(POLL_S)


def read_tightest(root: Path = Path("/")) -> MemoryUsage:
    """The memory limit nearest to exhaustion that applies to this process and its children."""
    return max(memory_usages(root), key=lambda one: (one.stalled >= HIGH_STALL_PERCENT, one.used_fraction))


def _finding(reading: MemoryUsage, where: str) -> Finding:
    stalled = f"; every process waited for memory {reading.stalled:.0f} % of the time" if reading.stalled else ""
    return Finding(
        code="memory-pressure",
        severity=Severity.WARNING,
        what=f"{_gib(reading.used_bytes)} of {_gib(reading.limit_bytes)} of memory are in use{stalled}; "
        "the kernel ends a rank when none is left",
        where=where,
        evidence=(f"limit of {reading.where}", *_largest_processes()),
        remedy="Use less memory (fewer DataLoader workers, less pinned memory), or ask for more: `resources.memory`.",
    )


def _largest_processes() -> tuple[str, ...]:
    """The three largest processes of this node, as evidence lines."""
    sizes = sorted(((_resident_bytes(pid), pid) for pid in descendants(os.getpid())), reverse=True)
    return tuple(f"process {pid}: {_gib(size)}: {command_line(pid)}" for size, pid in sizes[:3] if size)


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
