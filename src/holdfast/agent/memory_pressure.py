"""Owns the warning that a node's memory is nearly used up, given before the kernel ends a rank for it.

Of what host/memory_usage.py reads, what is nearest to its limit counts. Refuses to own the proof that a process was ended for
memory (memory.py).
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
"""Seconds between two looks."""

HIGH_USE = 0.92
"""Part of the memory in use from which on it is told."""

HIGH_STALL_PERCENT = 20.0
"""Per cent of the last ten seconds in which every process waited for memory, from which on it is told."""

LOW_USE = 0.85
"""Part in use below which it may be told again."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


async def watch_memory(where: str, report_finding: Callable[[Finding], None]) -> None:
    """Look for ever, and say when memory is short: once until there is relief."""
    reported = False
    while True:
        reading = read_tightest()
        short = reading.used_fraction >= HIGH_USE or reading.stalled >= HIGH_STALL_PERCENT
        if short and not reported:
            report_finding(_finding(reading, where))
        reported = short or (reported and reading.used_fraction > LOW_USE)
        await asyncio.sleep(POLL_S)


def read_tightest(root: Path = Path("/")) -> MemoryUsage:
    """The tightest limit that this process and its children are under."""
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
    """The three largest processes of this node, as lines of evidence."""
    sizes = sorted(((_resident_bytes(pid), pid) for pid in descendants(os.getpid())), reverse=True)
    return tuple(f"process {pid}: {_gib(size)}: {command_line(pid)}" for size, pid in sizes[:3] if size)


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
