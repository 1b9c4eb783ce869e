"""Owns that a lab's programs go on: one that ends is started again, as a cluster does with its operators' pods.

What ends time and again is started ever later; who waits for it to be ready is told (runner.py).
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
    """Of one lab's programs, by their names."""

    def __init__(self, paths: LabPaths, programs: Mapping[str, LabProgram]) -> None:
        self._place = paths
        self._programs = programs
        self._restart_at: dict[str, float] = {}
        """When those that have ended are started again (monotonic seconds)."""

    def run(self) -> None:
        """Have them go on for as long as the lab is there."""
        while (known := state.load(self._place.folder)) is not None:
            self.restart_dead(known)
            time.sleep(POLL_S)

    def restart_dead(self, known: LabState) -> None:
        """Start again what has ended, each after its pause."""
        for name in self._programs.keys() & known.processes.keys() - known.stopped:
            if known.processes[name].alive:
                self._restart_at.pop(name, None)
                continue
            pause_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** known.crash_counts(name).in_a_row)
            if time.monotonic() >= self._restart_at.setdefault(name, time.monotonic() + pause_s):
                state.update(self._place.folder, lambda now, name=name: self._restart(now, name))
                del self._restart_at[name]

    def _restart(self, known: LabState, name: str) -> LabState:
        if known.processes[name].alive or name in known.stopped:  # somebody else was quicker
            return known
        process = runner.start(self._programs[name], self._place, dies_with_parent=known.dies_with_parent)
        return known.with_process(name, process, known.count_crash(name))
