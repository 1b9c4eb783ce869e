"""`python -m holdfast.agent.hoard`: takes the memory of the group it is in until the kernel ends a process for it.

What it takes belongs to the group and to no process (a memfd), so that the kernel, which ends the process with most
memory, ends a rank and not this one. It waits once before the end, as long as a program that grows leaves for a
warning.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast.agent.memory import before, kills_since
from holdfast.agent.pressure import LOOK_S, NEARLY
from holdfast.host.cgroups import PREFIX, memory_group
from holdfast.host.limits import RANK_OOM_SCORE
from holdfast.host.memory import of_group

CHUNK_BYTES = 1 << 16
"""Little: until it is had, this process cannot see that one was ended."""
WARNING_S = 2 * LOOK_S
_ENOUGH = (1 + NEARLY) / 2


def main() -> None:
    """Take memory; refuses where the group is none of holdfast's making."""
    group = memory_group()
    if group is None or not group.name.startswith(PREFIX):
        raise SystemExit("this node is held to no limit of its own")
    # After a rank, and before the agent, where the kernel ends another before this process has seen the first.
    Path("/proc/self/oom_score_adj").write_text(str(RANK_OOM_SCORE // 2))
    witness, hoard, warned = before(), os.memfd_create("holdfast-drill"), False
    while not kills_since(witness):
        reading = of_group(group)
        if not warned and reading is not None and reading.part >= _ENOUGH:
            time.sleep(WARNING_S)
            warned = True
        try:
            os.write(hoard, bytes(CHUNK_BYTES))
        except OSError:
            return


if __name__ == "__main__":
    main()
