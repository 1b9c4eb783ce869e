"""Detects whether other processes are using the machine, from the kernel's count of busy time.

Waiting for an idle machine, and repeating a disturbed measurement, selects moments by other load, never by the result.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0))
SAMPLE_S = 0.25
QUIET_SHARE = 0.08
"""Share of the machine's cores that others may keep busy while it counts as idle."""
MAX_WAIT_S = 5.0
"""Longest wait for an idle machine; then the measurement runs anyhow."""


def busy_s() -> float:
    """CPU seconds that all cores together have been busy, interrupted or stolen by the host since boot."""
    # cpu  user nice system idle iowait irq softirq steal ...
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / TICKS


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, in user and in kernel mode; none when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = text[text.rindex(")") + 2 :].split()
    return sum(map(int, fields[11:13])) / TICKS


def wait_until_idle(patience_s: float = MAX_WAIT_S) -> bool:
    """Wait until others leave the machine idle, with no part of the bench running; return whether they did."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before, began = busy_s(), time.monotonic()
        time.sleep(SAMPLE_S)
        if (busy_s() - before) / (time.monotonic() - began) / CORES <= QUIET_SHARE:
            return True
    return False
