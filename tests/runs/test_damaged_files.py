"""Live runs with a damaged directory: they continue where possible; otherwise the damage is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.runs.conftest import Runs, leftovers_of
from tests.waiting import until

from holdfast import api
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import (
    AttemptStarted,
    ControllerStarted,
    FindingRaised,
    Outcome,
    RanksStarted,
    RunFinished,
    StepCommitted,
)
from holdfast.events.log import last_event
from holdfast.host.processes import ProcessId, identify
from holdfast.run_dir import AGENT_RECORD_NAME


def test_run_whose_controller_cannot_start_says_so_and_is_ended_by_force(runs: Runs) -> None:
    watched = runs.steps(10_000, 0.05)
    run = watched.folder
    watched.wait_for(RanksStarted)
    watched.wait_for(RanksStarted)
    run.job.write_text("not JSON")
    os.kill(watched.all(ControllerStarted)[-1].pid, signal.SIGKILL)
    until(lambda: api.controller_failing(run) is not None)
    failing = api.controller_failing(run)
    assert failing is not None
    assert any("job.json of" in line for line in failing.evidence)
    with pytest.raises(HoldfastError) as raised:
        api.cancel(run)
    assert raised.value.findings[0].code == "controller-failing"
    assert f"holdfast cancel --force {run.run_id}" in raised.value.findings[0].remedy
    assert api.cancel(run, force=True) is False
    ended = api.events(run)[-1]
    assert isinstance(ended, RunFinished)
    assert (ended.outcome, ended.exit_code) == (Outcome.CANCELLED, ExitCode.CANCELLED)
    assert not run.alive()
    assert leftovers_of(run) == []


def test_run_continues_after_damage_to_its_supervisors_record_and_kills_no_foreign_process(runs: Runs) -> None:
    watched = runs.steps(10_000, 0.05)
    run = watched.folder
    watched.wait_for(RanksStarted)
    watched.wait_for(RanksStarted)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        theirs = identify(stranger.pid)
        assert isinstance(theirs, ProcessId)
        # As if the agent's number had been given to another process, after a reboot with the same start.
        recorded = f'{{"pid": {theirs.pid}, "started": {theirs.started}}}'
        run.controller_record.write_text("[]")
        (run.node_dir(1, 0) / AGENT_RECORD_NAME).write_text(recorded)
        os.kill(watched.all(ControllerStarted)[-1].pid, signal.SIGKILL)
        watched.wait_for(ControllerStarted)
        assert run.read_controller_record()["host"] == "127.0.0.1"
        assert api.cancel(run) is True
        assert watched.wait_for_end().outcome is Outcome.CANCELLED
        assert stranger.poll() is None
        stranger.communicate()
    assert len(watched.all(AttemptStarted)) == 1


@pytest.mark.parametrize("how", ["a stray byte", "a line", "emptied", "cut", "removed", "replaced"])
def test_log_that_something_else_changes_is_put_back_and_no_event_is_lost(runs: Runs, how: str) -> None:
    watched = runs.steps(60, 0.1)
    run = watched.folder
    watched.wait_for(StepCommitted, lambda step: step.step >= 5)
    match how:
        case "a stray byte" | "a line":
            with run.events.open("ab") as log:
                log.write(b"x" if how == "a stray byte" else b"not an event\n")
        case "emptied":
            os.truncate(run.events, 0)
        case "cut":
            os.truncate(run.events, run.events.stat().st_size * 2 // 3)
        case _:
            run.events.unlink()
            if how == "replaced":
                os.mkfifo(run.events)
    until(lambda: run.events.is_file() and isinstance(last_event(run.events), RunFinished))
    known = api.events(run)
    found = [event.finding for event in known if isinstance(event, FindingRaised)]
    assert [finding.code for finding in found] == ["event-log-repaired"]
    steps = [event for event in known if isinstance(event, StepCommitted)]
    assert sum(event.steps for event in steps) == 60
    assert len([event for event in known if isinstance(event, ControllerStarted)]) == 1
    assert api.summary(run).corrupt_lines == 0
    assert "event-log-repaired" in {finding.code for finding in api.summary(run).other_findings}
    assert "another controller" not in run.controller_log.read_text()
    until(lambda: not run.alive())


def test_log_emptied_while_there_was_no_controller_ends_the_run_with_that_reason(runs: Runs) -> None:
    watched = runs.steps(10_000, 0.05)
    run = watched.folder
    watched.wait_for(StepCommitted)
    supervisor = run.read_controller_record()["supervisor_pid"]
    os.kill(supervisor, signal.SIGSTOP)
    controller = identify(watched.all(ControllerStarted)[-1].pid)
    assert controller is not None
    os.kill(controller.pid, signal.SIGKILL)
    until(lambda: not controller.alive)
    os.truncate(run.events, 0)
    os.kill(supervisor, signal.SIGCONT)
    until(lambda: not run.alive())
    ended = api.events(run)[-1]
    assert isinstance(ended, RunFinished)
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, ExitCode.STORAGE_FAILED)
    summary = api.summary(run)
    assert summary.finding is not None
    assert summary.finding.code == "event-log-corrupt"
    assert summary.corrupt_lines == 1
    assert leftovers_of(run) == []
