"""Stops the ranks of one attempt on this node: SIGTERM, and SIGKILL after a grace."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from holdfast.agent.rank_process import RankProcess
from holdfast.findings import Finding, Severity, replica_suffix
from holdfast.host.processes import state_letter

EXIT_GRACE_S = 2.0
"""Seconds that a disconnected rank gets to exit on its own before it is killed: an interpreter cleans up first."""


class RankStopper:
    """The pending end of an attempt's ranks; `has_closed` returns whether a rank has disconnected."""

    def __init__(
        self,
        processes: Sequence[RankProcess],
        *,
        node: int,
        replica: int,
        has_closed: Callable[[int], bool],
        report_finding: Callable[[Finding], None],
    ) -> None:
        self._processes = processes
        self._node = node
        self._replica = replica
        self._has_closed = has_closed
        self._report_finding = report_finding
        self._timer: asyncio.TimerHandle | None = None

    def stop(self, grace_s: float, *, before: Callable[[], object]) -> None:
        """SIGTERM and, `grace_s` later, SIGKILL; without grace SIGKILL immediately. Calls `before` ahead of SIGTERM."""
        kill_at = asyncio.get_running_loop().time() + grace_s
        if self._timer is not None:
            if self._timer.when() <= kill_at:
                return  # repeated order: the first grace applies
            self._timer.cancel()
        if grace_s <= 0:
            self._kill_now()
            return
        before()
        self._signal_all(signal.SIGTERM)
        self._timer = asyncio.get_running_loop().call_at(kill_at, self._kill_after_grace, grace_s)

    def cancel(self) -> None:
        """All ranks have exited."""
        if self._timer is not None:
            self._timer.cancel()

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.stop(number)
            if number is not signal.SIGKILL:
                process.signal(signal.SIGCONT, group=True)

    def _kill_now(self) -> None:
        """Kill every rank, except that a disconnected rank may still exit on its own: its exit may be the cause."""
        exiting = [
            process
            for process in self._processes
            if process.running and process.launch.rank_count == 1 and self._has_closed(process.rank)
        ]
        for process in self._processes:
            if process not in exiting:
                process.stop(signal.SIGKILL)
        if exiting:
            self._timer = asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._signal_all, signal.SIGKILL)

    def _kill_after_grace(self, grace_s: float) -> None:
        """Kill the ranks that are left after the grace, and report them."""
        remaining = [process for process in self._processes if process.running]
        if remaining:
            ranks = ", ".join(str(process.rank) for process in remaining) + replica_suffix(self._replica)
            states = tuple(
                f"rank {process.rank}, process {process.pid}, state {state_letter(process.pid)}"
                for process in remaining
            )
            finding = Finding(
                code="ignored-sigterm",
                severity=Severity.WARNING,
                what=f"rank {ranks} was still there {grace_s:g} s after SIGTERM, and was killed",
                where=f"node{self._node}",
                evidence=states[:8],
                remedy="Have the program end on SIGTERM (a Session does), or raise `recovery.stop_grace_s`.",
            )
            self._report_finding(finding)
        self._signal_all(signal.SIGKILL)
