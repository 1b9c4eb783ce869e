"""Owns where a run's metrics go beside its controller: lines for who watches, and trackers of experiments.

Rank 0's figures. Refuses to own what they are (meter.py), and the wire to the agent (channel.py).
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding
from holdfast.measure.catalog import waited_for
from holdfast.measure.words import told
from holdfast.train.courier import Courier
from holdfast.train.environment import Environment
from holdfast.train.trackers import TRACKERS, Story

LINE_EVERY_S = 10.0
"""Seconds between two lines."""
NAME_FILE = "run.txt"
"""In the folder of checkpoints: what a run that holdfast has not started is called by trackers."""


class Journal:
    """Takes the figures of each step, on rank 0."""

    def __init__(self, told: Environment) -> None:
        """A line now and then where no agent is told instead."""
        if unknown := sorted(set(told.report_to) - TRACKERS.keys()):
            raise failure(
                "tracker-unknown",
                f"there is no tracker {unknown[0]!r}",
                exit_code=ExitCode.USAGE,
                where="Session(report_to=...) or HOLDFAST_REPORT_TO",
                evidence=(f"known are {', '.join(TRACKERS)}",),
                remedy="name one that is known, or leave it out: steps are reported to the run all the same",
            )
        self._told = told
        self._couriers: list[Courier] = []
        self._lines = told.rank_socket is None
        self._written_at = -math.inf

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """Trackers are opened with the first step, when it is known which one that is."""
        if self._told.report_to and not self._couriers:
            story = _story(self._told, step - 1)
            self._couriers = [Courier(name, TRACKERS[name](), story) for name in self._told.report_to]
        for courier in self._couriers:
            courier.take(step, metrics)
        if self._lines:
            self._line(step, metrics)

    def noted(self) -> Iterator[Finding]:
        """What is to be said of trackers."""
        return (finding for courier in self._couriers if (finding := courier.noted()) is not None)

    def close(self) -> None:
        """The last step was taken."""
        for courier in self._couriers:
            courier.close()

    def _line(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._written_at >= LINE_EVERY_S or waited_for(metrics):
            self._written_at = now
            sys.stdout.write(f"step {step}: {', '.join(told(metrics))}\n")
            sys.stdout.flush()


def _story(told: Environment, after: int) -> Story:
    """One name for all attempts: the run's, else one that is kept with its checkpoints."""
    name = told.run or _kept_name(told.checkpoint_folder)
    replica = f"-replica{told.replica}" if told.replica else ""
    return Story(run=f"{name}{replica}", after=after, folder=told.checkpoint_folder or Path("runs"))


def _kept_name(folder: Path | None) -> str:
    fresh = f"run-{secrets.token_hex(4)}"
    if folder is None:
        return fresh
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / NAME_FILE
        if not file.exists():
            file.write_text(fresh)
        return file.read_text().strip() or fresh
    return fresh
