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

from holdfast.findings import Finding, Severity, replica_suffix
from holdfast.host import cgroups
from holdfast.host.processes import (
    HELPER,
    boot_ticks,
    by_env,
    by_process_group,
    by_session,
    command_line,
    descendants,
    kill_all,
    listening_ports,
    reap,
    strays,
    wait_for_end,
    with_env_names,
)

log = logging.getLogger("holdfast.agent")

KILL_TIMEOUT_S = 10.0
"""Longest to wait for killed processes to be gone; only the kernel can hold one longer."""

HELPER_EXIT_TIMEOUT_S = 0.5
"""Longest that helpers of a program which ended well get to see that it has: Python's resource tracker, for one."""

_KNOWN_VARIABLES = (HELPER, "HOLDFAST_ZYGOTE", "HOLDFAST_ATTEMPT")
"""Variables of what this agent starts in a session of its own: helpers, held programs, and ranks, of any attempt."""

_MAX_SHOWN = 8


class OrphanProcesses:
    """What the ranks of one attempt left running; made before any of them is started."""

    def __init__(self, folder: Path, *, run: str, node: int, replica: int, attempt: int) -> None:
        self._replica, self._attempt = replica, attempt
        self._markers = {"HOLDFAST_REPLICA": str(replica), "HOLDFAST_ATTEMPT": str(attempt)}
        self._since = boot_ticks()
        self._folder = folder
        self._name = f"{run}-{node}-{replica}-{attempt}-{os.getpid()}"
        self._record: Path | None = None
        self.cgroup: Path | None = None
        """The cgroup that the attempt's processes are in; none where none can be made."""

    def create_cgroup(self) -> None:
        """Make the attempt's group, where that is possible."""
        group = cgroups.tracking_group(self._name)
        if group is None:
            return
        try:
            self._record = cgroups.record_group(self._folder, group, f"-{self._replica}-{self._attempt}")
            group.mkdir()
        except OSError as error:
            log.info("no cgroup for this attempt: %s", error)
            self._remove_record()
        else:
            self.cgroup = group

    def pids(self, ranks: Collection[int] = ()) -> list[int]:
        """Their processes; `ranks` are those of the ranks."""
        below = descendants(os.getpid())
        ours = {*by_env(below, **self._markers), *by_process_group(below, ranks)}
        more = cgroups.all_members(self.cgroup) if self.cgroup is not None else self._unaccounted(below, ours)
        return sorted(ours.union(more))

    def kill(self, ranks: Collection[int] = ()) -> list[int]:
        """End them all and remove the group; those that the kernel holds are returned."""
        if self.cgroup is None:
            return kill_all(lambda: self.pids(ranks), within_s=KILL_TIMEOUT_S)
        found = self.pids(ranks)
        cgroups.kill(self.cgroup)
        left = kill_all(lambda: self.pids(ranks), within_s=KILL_TIMEOUT_S)
        reap(found)
        cgroups.remove(self.cgroup)
        self._remove_record()
        return left

    def finding(self, where: str, ranks: Collection[int], *, succeeded: bool, launcher: bool) -> Finding | None:
        """What to say of what the ranks left running, once their helpers had a moment to end.

        Of ranks that did not end well, what is still in their sessions ends with them and is not worth a word; nor are
        the ranks that a `launcher` started in sessions of their own.
        """
        left = self._detached(ranks, succeeded=succeeded, launcher=launcher)
        wait_for_end(left, time.monotonic() + HELPER_EXIT_TIMEOUT_S)
        left = self._detached(ranks, succeeded=succeeded, launcher=launcher) if left else []
        if not left:
            return None
        count = f"{len(left)} process{'es' * (len(left) > 1)}"
        what = (
            f"the command has ended well and left {count}, which end with it"
            if succeeded
            else f"the ranks of attempt {self._attempt}{replica_suffix(self._replica)} left {count}, which were killed"
        )
        return Finding(
            code="orphan-processes",
            severity=Severity.WARNING,
            what=what,
            where=where,
            evidence=_format_processes(left),
            remedy="Keep the work in the foreground: no `&`, no daemon; a script can `wait` for what it starts.",
        )

    def _detached(self, ranks: Collection[int], *, succeeded: bool, launcher: bool) -> list[int]:
        left = self.pids(ranks)
        if succeeded:
            return left
        within = {*by_session(left, ranks), *(by_env(left, **self._markers) if launcher else ())}
        return [pid for pid in left if pid not in within]

    def _unaccounted(self, below: Sequence[int], ours: Collection[int]) -> set[int]:
        """Those that nothing but their start tells of; whose they are is not known while others have ranks here."""
        own = {os.getsid(0)}
        others = [pid for pid in with_env_names(below, "HOLDFAST_ATTEMPT") if pid not in ours]
        if len(by_session(others, own)) < len(others):
            return set()
        # The first process of a pod also adopts what somebody has started there by `kubectl exec`.
        known = (*_KNOWN_VARIABLES, "KUBERNETES_SERVICE_HOST") if os.getpid() == 1 else _KNOWN_VARIABLES
        return {*strays(below, own=own, known=known, since=self._since)}

    def _remove_record(self) -> None:
        if self._record is not None:
            with contextlib.suppress(OSError):
                self._record.unlink(missing_ok=True)


def _format_processes(left: Sequence[int]) -> tuple[str, ...]:
    lines = tuple(f"process {pid}: {command_line(pid)}{_format_ports(pid)}" for pid in left[:_MAX_SHOWN])
    return (*lines, f"and {len(left) - _MAX_SHOWN} more") if len(left) > _MAX_SHOWN else lines


def _format_ports(pid: int) -> str:
    ports = listening_ports(pid)
    return f", listening on port{'s' * (len(ports) > 1)} {', '.join(map(str, ports[:_MAX_SHOWN]))}" if ports else ""
