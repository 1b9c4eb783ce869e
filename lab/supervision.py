"""Owns that a lab's programs go on: one that ends is started again, as a cluster does with its operators' pods.

What ends time and again is started ever later; who waits for it to be ready is told (runner.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from lab import runner, state
from lab.programs import Place, Program
from lab.state import State

BEAT_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0


class Supervision:
    """Of one lab's programs, by their names."""

    def __init__(self, place: Place, programs: Mapping[str, Program]) -> None:
        self._place = place
        self._programs = programs
        self._due: dict[str, float] = {}
        """When those that have ended are started again (monotonic seconds)."""

    def keep(self) -> None:
        """Have them go on for as long as the lab is there."""
        while (known := state.load(self._place.folder)) is not None:
            self.look(known)
            time.sleep(BEAT_S)

    def look(self, known: State) -> None:
        """Start again what has ended, each after its pause."""
        for name in self._programs.keys() & known.processes.keys() - known.stopped:
            if known.processes[name].alive:
                self._due.pop(name, None)
                continue
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** known.ended(name).in_a_row)
            if time.monotonic() >= self._due.setdefault(name, time.monotonic() + pause_s):
                state.change(self._place.folder, lambda now, name=name: self._started_again(now, name))
                del self._due[name]

    def _started_again(self, known: State, name: str) -> State:
        if known.processes[name].alive or name in known.stopped:  # somebody else was quicker
            return known
        process = runner.run(self._programs[name], self._place, tied=known.tied)
        return known.with_process(name, process, known.once_more(name))
