"""Bad luck with disks, processes and resources, for real: said clearly, nothing lost, nothing left."""

from __future__ import annotations

import os
from pathlib import Path

from tests.runs.conftest import Runs

from holdfast import api
from holdfast.errors import ExitCode
from holdfast.events import (
    AttemptStarted,
    ControllerStarted,
    DrillAction,
    DrillTarget,
    FindingRaised,
    Outcome,
    StepCommitted,
    StopDecided,
)


def overwrite(log: Path, kind: bytes) -> None:
    """Zero a part of the first line of a kind, as a failing disk might."""
    at = log.read_bytes().index(b'"type":"%s"' % kind)
    with log.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes(20), at)


def test_log_damaged_where_nothing_was_decided_is_gone_on_from_and_said(runs: Runs) -> None:
    watched = runs.steps(60, 0.02)
    watched.until(StepCommitted, lambda event: event.step == 10)
    overwrite(watched.folder.events, b"step-committed")
    watched.drill(DrillTarget.CONTROLLER, 0, DrillAction.KILL)
    assert watched.end().outcome is Outcome.SUCCEEDED
    assert [event.finding.code for event in watched.all(FindingRaised)] == ["event-log-damaged"]
    assert len(watched.all(ControllerStarted)) == 2
    assert len(watched.all(AttemptStarted)) == 1
    assert api.summary(watched.folder).damaged_lines == 1


def test_log_damaged_where_it_matters_ends_the_run_with_the_reason(runs: Runs) -> None:
    watched = runs.steps(10_000, 0.02)
    watched.until(StepCommitted, lambda event: event.step == 10)
    overwrite(watched.folder.events, b"agent-joined")
    watched.drill(DrillTarget.CONTROLLER, 0, DrillAction.KILL)
    ended = watched.end()
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, ExitCode.STORAGE)
    (stop,) = watched.all(StopDecided)
    assert stop.finding is not None
    assert stop.finding.code == "event-log-broken"
