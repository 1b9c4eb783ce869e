"""`python -m holdfast.agent.memory_hog`: takes the memory of the group it is in until the kernel ends a process for it.

What it takes belongs to the group and to no process (a memfd), so that the kernel, which ends the process with most
memory, ends a rank and not this one. It waits once before the end, as long as a program that grows leaves for a
warning.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast.agent.memory_pressure import HIGH_USE, POLL_S
from holdfast.agent.oom import kills_since, oom_snapshot
from holdfast.host.cgroups import PREFIX, memory_group
from holdfast.host.memory_usage import cgroup_usage
from holdfast.host.process_limits import RANK_OOM_SCORE

CHUNK_BYTES = 1 << 16
"""Little: until it is had, this process cannot see that one was ended."""
WARNING_S = 2 * POLL_S
_WARN_AT = (1 + HIGH_USE) / 2


def main() -> None:
    """Take memory; refuses where the group is none of holdfast's making."""
    group = memory_group()
    if group is None or not group.name.startswith(PREFIX):
        raise SystemExit("this node is held to no limit of its own")
    # After a rank, and before the agent, where the kernel ends another before this process has seen the first.
    Path("/proc/self/oom_score_adj").write_text(str(RANK_OOM_SCORE // 2))
    before, memfd, warned = oom_snapshot(), os.memfd_create("holdfast-drill"), False
    while not kills_since(before):
        reading = cgroup_usage(group)
        if not warned and reading is not None and reading.used_fraction >= _WARN_AT:
            time.sleep(WARNING_S)
            warned = True
        try:
            os.write(memfd, bytes(CHUNK_BYTES))
        except OSError:
            return


if __name__ == "__main__":
    main()
