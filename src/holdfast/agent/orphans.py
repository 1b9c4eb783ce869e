"""Finds and kills the orphan processes of a node's ranks: no process of an attempt outlives it.

With cgroup v2 every attempt has a cgroup, which its processes cannot leave. Without it a process counts as an orphan if
it descends from this agent, which is a subreaper, and one of these is true:

- its environment has the attempt's marker;
- it is in the process group of one of the attempt's ranks;
- its session is unknown to the agent. Every rank starts its own session, so no process of a rank is in the agent's.
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
"""Longest wait for killed processes to be gone; only the kernel can keep one longer."""

HELPER_EXIT_TIMEOUT_S = 0.5
"""Longest that helpers of a program that exited successfully get to notice it, such as Python's resource tracker."""

_KNOWN_VARIABLES = (HELPER, "HOLDFAST_ZYGOTE", "HOLDFAST_ATTEMPT")
"""Variables of the processes that this agent starts in their own session: helpers, zygotes, and ranks of any attempt.
"""

_MAX_SHOWN = 8


class OrphanProcesses:
    """Processes that the ranks of one attempt leave running; must exist before any rank starts."""

    def __init__(self, folder: Path, *, run: str, node: int, replica: int, attempt: int) -> None:
        self._replica, self._attempt = replica, attempt
        self._markers = {"HOLDFAST_REPLICA": str(replica), "HOLDFAST_ATTEMPT": str(attempt)}
        self._since = boot_ticks()
        self._folder = folder
        self._name = f"{run}-{node}-{replica}-{attempt}-{os.getpid()}"
        self._record: Path | None = None
        self.cgroup: Path | None = None
        """The attempt's cgroup; None if none can be created."""

    def create_cgroup(self) -> None:
        """Create the attempt's cgroup, if possible."""
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
        """The attempt's processes; `ranks` are the pids of its ranks."""
        below = descendants(os.getpid())
        ours = {*by_env(below, **self._markers), *by_process_group(below, ranks)}
        more = cgroups.all_members(self.cgroup) if self.cgroup is not None else self._unaccounted(below, ours)
        return sorted(ours.union(more))

    def kill(self, ranks: Collection[int] = ()) -> list[int]:
        """Kill the attempt's processes and remove its cgroup; return the pids that the kernel keeps."""
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
        """The finding on processes that the ranks left running, after their helpers had a moment to exit.

        When ranks did not succeed, processes in their sessions are killed with them and are not reported. Ranks that a
        `launcher` started in their own sessions are not reported either.
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
        """Stray descendants, known only by their start time; none while other attempts run here, which may own them."""
        own = {os.getsid(0)}
        others = [pid for pid in with_env_names(below, "HOLDFAST_ATTEMPT") if pid not in ours]
        if len(by_session(others, own)) < len(others):
            return set()
        # The first process of a pod also adopts processes that users have started there with `kubectl exec`.
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
