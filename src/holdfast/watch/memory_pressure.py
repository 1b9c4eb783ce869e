"""Warns that a node's memory is nearly used up, before the kernel kills a rank.

Of the limits that host/memory_usage.py reads, the one nearest to exhaustion counts. agent/oom.py finds the evidence
after a kill.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.findings import Owner
from holdfast.host.memory_usage import MemoryUsage, memory_usages
from holdfast.host.processes import command_line, descendants
from holdfast.watch.monitor import Symptom

POLL_S = 2.0
"""Seconds between two polls."""

HIGH_USE = 0.92
"""Fraction of memory in use from which the agent warns."""

HIGH_STALL_PERCENT = 20.0
"""Per cent of the last ten seconds in which all processes waited for memory, from which the agent warns."""

LOW_USE = 0.85
"""Fraction in use down to which an episode lasts."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def read_tightest(root: Path = Path("/")) -> MemoryUsage:
    """The memory limit nearest to exhaustion that applies to this process and its children."""
    return max(memory_usages(root), key=lambda one: (one.stalled >= HIGH_STALL_PERCENT, one.used_fraction))


def memory_symptoms(_before: MemoryUsage, now: MemoryUsage) -> Iterator[Symptom]:
    """Whether memory is short, or has not yet recovered."""
    short = now.used_fraction >= HIGH_USE or now.stalled >= HIGH_STALL_PERCENT
    if short or now.used_fraction > LOW_USE:
        stalled = f"; every process waited for memory {now.stalled:.0f} % of the time" if now.stalled else ""
        yield Symptom(
            code="memory-pressure",
            device="",
            what=f"{_gib(now.used_bytes)} of {_gib(now.limit_bytes)} of memory are in use{stalled}; "
            "the kernel ends a rank when none is left",
            evidence=lambda: (f"limit of {now.where}", *_largest_processes()),
            remedy="Use less memory (fewer DataLoader workers, less pinned memory), or ask for more: "
            "`resources.memory`.",
            owner=Owner.USER,
            begins=short,
            clear_s=0.0,
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
