"""Writes rank 0's metrics to stderr and to experiment trackers, in addition to the controller.

What is measured: step_meter.py; the wire to the agent: agent_client.py.
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
from holdfast.metrics.metric_catalog import has_requested
from holdfast.metrics.metric_text import format_metrics
from holdfast.train.metrics.async_tracker import AsyncTracker
from holdfast.train.metrics.trackers import TRACKERS, TrackedRun
from holdfast.train.session.rank_config import RankConfig

LINE_EVERY_S = 10.0
"""Seconds between two lines."""
NAME_FILE = "run.txt"
"""In the checkpoint folder: the name that trackers use for a run that holdfast has not started."""


class MetricsSink:
    """Receives the metrics of each step, on rank 0."""

    def __init__(self, config: RankConfig) -> None:
        """Print a line every `LINE_EVERY_S` if there is no agent."""
        if unknown := sorted(set(config.report_to) - TRACKERS.keys()):
            raise failure(
                "tracker-unknown",
                f"there is no tracker {unknown[0]!r}",
                exit_code=ExitCode.USAGE,
                where="Session(report_to=...) or HOLDFAST_REPORT_TO",
                evidence=(f"known are {', '.join(TRACKERS)}",),
                remedy="name one that is known, or leave it out: steps are reported to the run all the same",
            )
        self._config = config
        self._trackers: list[AsyncTracker] = []
        self._prints_lines = config.rank_socket is None
        self._written_at = -math.inf

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step; the first one opens the trackers, because only then is the resumed step known."""
        if self._config.report_to and not self._trackers:
            tracked_run = _tracked_run(self._config, step - 1)
            self._trackers = [AsyncTracker(name, TRACKERS[name](), tracked_run) for name in self._config.report_to]
        for tracker in self._trackers:
            tracker.log(step, metrics)
        if self._prints_lines:
            self._print_line(step, metrics)

    def take_findings(self) -> Iterator[Finding]:
        """Findings about trackers."""
        return (finding for tracker in self._trackers if (finding := tracker.take_finding()) is not None)

    def close(self) -> None:
        """Close the trackers after the last step."""
        for tracker in self._trackers:
            tracker.close()

    def _print_line(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._written_at >= LINE_EVERY_S or has_requested(metrics):
            self._written_at = now
            sys.stdout.write(f"step {step}: {', '.join(format_metrics(metrics))}\n")
            sys.stdout.flush()


def _tracked_run(config: RankConfig, after: int) -> TrackedRun:
    """One name for all attempts: the run's, else one that is stored with its checkpoints."""
    name = config.run or _stored_run_name(config.checkpoint_folder)
    replica = f"-replica{config.replica}" if config.replica else ""
    return TrackedRun(run=f"{name}{replica}", resumed_step=after, folder=config.checkpoint_folder or Path("runs"))


def _stored_run_name(folder: Path | None) -> str:
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
