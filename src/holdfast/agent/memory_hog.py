"""`python -m holdfast.agent.memory_hog`: fills its cgroup's memory until the kernel kills a process of the cgroup.

The memory is in a memfd, which counts for the cgroup and for no process. The kernel kills the process with the most
memory, so it kills a rank and not this process. It waits once near the limit, as long as a growing program would leave
for the warning of memory pressure.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast.agent.oom import kills_since, oom_snapshot
from holdfast.host.cgroups import PREFIX, memory_group
from holdfast.host.memory_usage import cgroup_usage
from holdfast.host.process_limits import RANK_OOM_SCORE
from holdfast.watch.memory_pressure import HIGH_USE, POLL_S

CHUNK_BYTES = 1 << 16
"""Small, because this process cannot notice a kill while it allocates."""
WARNING_S = 2 * POLL_S
_WARN_AT = (1 + HIGH_USE) / 2


def main() -> None:
    """Allocate memory; exit if the cgroup was not created by holdfast."""
    group = memory_group()
    if group is None or not group.name.startswith(PREFIX):
        raise SystemExit("this node has no memory limit")
    # The kernel may kill a second process before this one has noticed the first kill: let that be this one, not the
    # agent.
    Path("/proc/self/oom_score_adj").write_text(str(RANK_OOM_SCORE // 2))
    before, memfd, warned = oom_snapshot(), os.memfd_create("holdfast-memory-hog"), False
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
