"""Owns what a node's ranks leave behind when they have ended, and its end: nothing of an attempt outlives it.

Where cgroup v2 allows it, every attempt has a group, which its processes cannot leave. Elsewhere a process counts as
left behind when it descends from this agent, which adopts orphans, and either carries the attempt's mark in its
environment, or is in the process group of one of its ranks, or is in a session that nobody here accounts for: ranks
begin sessions of their own, so nothing that they start is ever in the agent's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from holdfast.findings import Finding, Severity, of_replica
from holdfast.host import cgroups
from holdfast.host.processes import (
    HELPER,
    carrying,
    command_of,
    descendants,
    end_all,
    grouped,
    in_sessions,
    marked,
    ports_of,
    reap,
    strays,
    ticks,
    wait_for_end,
)

log = logging.getLogger("holdfast.agent")

END_S = 10.0
"""Longest to wait for killed processes to be gone; only the kernel can hold one longer."""

MOMENT_S = 0.5
"""Longest that helpers of a program which ended well get to see that it has: Python's resource tracker, for one."""

_ACCOUNTED = (HELPER, "HOLDFAST_WARM", "HOLDFAST_ATTEMPT")
"""Variables of what this agent starts in a session of its own: helpers, held programs, and ranks, of any attempt."""

_SHOWN = 8


class Leftovers:
    """What the ranks of one attempt left running; made before any of them is started."""

    def __init__(self, folder: Path, *, run: str, node: int, replica: int, attempt: int) -> None:
        self._replica, self._attempt = replica, attempt
        self._marks = {"HOLDFAST_REPLICA": str(replica), "HOLDFAST_ATTEMPT": str(attempt)}
        self._since = ticks()
        self._folder = folder
        self._name = f"{run}-{node}-{replica}-{attempt}-{os.getpid()}"
        self._note: Path | None = None
        self.group: Path | None = None
        """The cgroup that the attempt's processes are in; none where none can be made."""

    def prepare(self) -> None:
        """Make the attempt's group, where that is possible."""
        group = cgroups.tracking_group(self._name)
        if group is None:
            return
        try:
            self._note = cgroups.note(self._folder, group, f"-{self._replica}-{self._attempt}")
            group.mkdir()
        except OSError as error:
            log.info("no cgroup for this attempt: %s", error)
            self._forget()
        else:
            self.group = group

    def find(self, ranks: Collection[int] = ()) -> list[int]:
        """Their processes; `ranks` are those of the ranks."""
        below = descendants(os.getpid())
        ours = {*marked(below, **self._marks), *grouped(below, ranks)}
        more = cgroups.all_members(self.group) if self.group is not None else self._strays(below, ours)
        return sorted(ours.union(more))

    def end(self, ranks: Collection[int] = ()) -> list[int]:
        """End them all and remove the group; those that the kernel holds are returned."""
        if self.group is None:
            return end_all(lambda: self.find(ranks), within_s=END_S)
        found = self.find(ranks)
        cgroups.kill(self.group)
        left = end_all(lambda: self.find(ranks), within_s=END_S)
        reap(found)
        cgroups.dissolve(self.group)
        self._forget()
        return left

    def finding(self, where: str, ranks: Collection[int], *, well: bool, launcher: bool) -> Finding | None:
        """What to say of what the ranks left running, once their helpers had a moment to end.

        Of ranks that did not end well, what is still in their sessions ends with them and is not worth a word; nor are
        the ranks that a `launcher` started in sessions of their own.
        """
        left = self._detached(ranks, well=well, launcher=launcher)
        wait_for_end(left, time.monotonic() + MOMENT_S)
        left = self._detached(ranks, well=well, launcher=launcher) if left else []
        if not left:
            return None
        count = f"{len(left)} process{'es' * (len(left) > 1)}"
        what = (
            f"the command has ended well and left {count}, which end with it"
            if well
            else f"the ranks of attempt {self._attempt}{of_replica(self._replica)} left {count}, which were killed"
        )
        return Finding(
            code="left-processes",
            severity=Severity.WARNING,
            what=what,
            where=where,
            evidence=_shown(left),
            remedy="Keep the work in the foreground: no `&`, no daemon; a script can `wait` for what it starts.",
        )

    def _detached(self, ranks: Collection[int], *, well: bool, launcher: bool) -> list[int]:
        left = self.find(ranks)
        if well:
            return left
        within = {*in_sessions(left, ranks), *(marked(left, **self._marks) if launcher else ())}
        return [pid for pid in left if pid not in within]

    def _strays(self, below: Sequence[int], ours: Collection[int]) -> set[int]:
        """Those that nothing but their start tells of; whose they are is not known while others have ranks here."""
        own = {os.getsid(0)}
        others = [pid for pid in carrying(below, "HOLDFAST_ATTEMPT") if pid not in ours]
        if len(in_sessions(others, own)) < len(others):
            return set()
        # The first process of a pod also adopts what somebody has started there by `kubectl exec`.
        known = (*_ACCOUNTED, "KUBERNETES_SERVICE_HOST") if os.getpid() == 1 else _ACCOUNTED
        return {*strays(below, own=own, known=known, since=self._since)}

    def _forget(self) -> None:
        if self._note is not None:
            with contextlib.suppress(OSError):
                self._note.unlink(missing_ok=True)


def _shown(left: Sequence[int]) -> tuple[str, ...]:
    lines = tuple(f"process {pid}: {command_of(pid)}{_ports(pid)}" for pid in left[:_SHOWN])
    return (*lines, f"and {len(left) - _SHOWN} more") if len(left) > _SHOWN else lines


def _ports(pid: int) -> str:
    ports = ports_of(pid)
    return f", listening on port{'s' * (len(ports) > 1)} {', '.join(map(str, ports[:_SHOWN]))}" if ports else ""
