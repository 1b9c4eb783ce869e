"""Owns what a node's ranks leave behind when they have ended, and its end: nothing of an attempt outlives it.

A process counts as left behind when it descends from this agent, which adopts orphans, and carries the attempt's mark
in its environment or is in the process group of one of its ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from holdfast.findings import Finding, Severity
from holdfast.host.processes import command_of, descendants, end_all, grouped, marked, wait_for_end

END_S = 10.0
"""Longest to wait for killed processes to be gone; only the kernel can hold one longer."""

MOMENT_S = 0.5
"""Longest that helpers of a program which ended well get to see that it has: Python's resource tracker, for one."""

_SHOWN = 8


class Leftovers:
    """What the ranks of one attempt left running."""

    def __init__(self, *, replica: int, attempt: int, ranks: Iterable[int]) -> None:
        self._marks = {"HOLDFAST_REPLICA": str(replica), "HOLDFAST_ATTEMPT": str(attempt)}
        self._ranks = frozenset(ranks)

    def find(self) -> list[int]:
        """Their processes."""
        below = descendants(os.getpid())
        return sorted({*marked(below, **self._marks), *grouped(below, self._ranks)})

    def end(self) -> list[int]:
        """End them all; those that the kernel holds are returned."""
        return end_all(self.find, within_s=END_S)

    def finding(self, where: str) -> Finding | None:
        """What to say of what a command that ended well left running, once its helpers had a moment to end."""
        wait_for_end(self.find(), time.monotonic() + MOMENT_S)
        left = self.find()
        if not left:
            return None
        lines = tuple(f"process {pid}: {command_of(pid)}" for pid in left[:_SHOWN])
        more = (f"and {len(left) - _SHOWN} more",) if len(left) > _SHOWN else ()
        return Finding(
            code="left-processes",
            severity=Severity.WARNING,
            what=f"the command has ended well and left {len(left)} process{'es' * (len(left) > 1)}, which end with it",
            where=where,
            evidence=(*lines, *more),
            remedy="Keep the work in the foreground: no `&`, no daemon; a script can `wait` for what it starts.",
        )
