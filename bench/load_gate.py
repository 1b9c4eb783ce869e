"""Owns knowing whether somebody else is using the machine, from the kernel's count of time spent busy.

Waiting for quiet, and measuring again when it was broken, chooses moments by what others do, never by the result.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0))
SAMPLE_S = 0.25
QUIET_SHARE = 0.08
"""Share of the machine's cores that may be busy with others for it to count as quiet."""
MAX_WAIT_S = 5.0
"""Longest that a measurement waits for quiet; then it is taken anyhow."""


def busy_s() -> float:
    """CPU seconds that all cores together have been busy, interrupted or taken away by the host since boot."""
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
    """Wait until others leave the machine alone, with nothing of the bench running; whether they did."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before, began = busy_s(), time.monotonic()
        time.sleep(SAMPLE_S)
        if (busy_s() - before) / (time.monotonic() - began) / CORES <= QUIET_SHARE:
            return True
    return False
