"""Restarts the lab's programs when they exit, as a cluster does with its operators' pods.

Each crash in a row doubles the delay, up to 10 s; runner.py reports it to callers that wait for readiness.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from lab import runner, state
from lab.programs import LabPaths, LabProgram
from lab.state import LabState

POLL_S = 0.2
FIRST_DELAY_S, MAX_DELAY_S = 0.25, 10.0


class LabSupervisor:
    """Supervises one lab's programs, keyed by name."""

    def __init__(self, paths: LabPaths, programs: Mapping[str, LabProgram]) -> None:
        self._paths = paths
        self._programs = programs
        self._restart_at: dict[str, float] = {}
        """Time at which each exited program is restarted (monotonic seconds)."""

    def run(self) -> None:
        """Restart programs for as long as the lab exists."""
        while (known := state.load(self._paths.folder)) is not None:
            self.restart_dead(known)
            time.sleep(POLL_S)

    def restart_dead(self, known: LabState) -> None:
        """Restart the programs that have exited, each after its delay."""
        for name in self._programs.keys() & known.processes.keys() - known.stopped:
            if known.processes[name].alive:
                self._restart_at.pop(name, None)
                continue
            pause_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** known.crash_counts(name).in_a_row)
            if time.monotonic() >= self._restart_at.setdefault(name, time.monotonic() + pause_s):
                state.update(self._paths.folder, lambda now, name=name: self._restart(now, name))
                del self._restart_at[name]

    def _restart(self, known: LabState, name: str) -> LabState:
        if known.processes[name].alive or name in known.stopped:  # a user was quicker
            return known
        process = runner.start(self._programs[name], self._paths, dies_with_parent=known.dies_with_parent)
        return known.with_process(name, process, known.count_crash(name))
