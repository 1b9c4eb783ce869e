"""Two controllers for one run: the second is refused, and where nothing refuses it, the first one leaves by itself."""

from __future__ import annotations

import json
import os
import select
import signal
import socket

import pytest
from tests.runs.conftest import Runs, WatchedRun

from holdfast import api
from holdfast.events import (
    AttemptStarted,
    CheckpointCommitted,
    ControllerStarted,
    FaultAction,
    FaultTarget,
    FindingRaised,
    Outcome,
    StepCommitted,
)
from holdfast.events.log import EventReader
from holdfast.launch.start_supervisor import start_supervisor

DEADLINE_S = 60.0


def supervisor_of(watched: WatchedRun) -> int:
    return int(json.loads(watched.folder.controller_record.read_text())["supervisor_pid"])


def wait_for(process: int) -> None:
    """Wait for the end of a process, given by a descriptor of it."""
    assert select.select([process], [], [], DEADLINE_S)[0]
    os.close(process)


def test_second_supervisor_of_a_run_is_refused(runs: Runs) -> None:
    watched = runs.steps(100, 0.02)
    watched.wait_for(CheckpointCommitted)
    supervisor = supervisor_of(watched)
    accepted = api.accepted(watched.folder)
    with pytest.raises(api.HoldfastError) as refused:
        start_supervisor(watched.folder, accepted)
    assert refused.value.findings[0].code == "start-failed"
    assert "the run has a controller already" in "".join(refused.value.findings[0].evidence)
    assert supervisor_of(watched) == supervisor
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(ControllerStarted)) == 1


@pytest.mark.slow
def test_controller_that_wakes_after_it_was_replaced_does_no_harm(runs: Runs) -> None:
    watched = runs.steps(100_000, 0.02, overrides=("recovery.node_grace_s=30",))
    watched.wait_for(CheckpointCommitted)
    old = [supervisor_of(watched), watched.all(ControllerStarted)[-1].pid]
    ends = [os.pidfd_open(pid) for pid in old]
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    (watched.folder.path / "lock").unlink()  # a file system without locks
    assert api.restart_controller(watched.folder)
    taken = watched.wait_for(FindingRaised).finding
    watched.wait_for(ControllerStarted)
    assert supervisor_of(watched) != old[0]
    assert taken.code == "controller-port-in-use"
    assert "process" in taken.evidence[0]
    watched.wait_for(StepCommitted)
    for pid in reversed(old):
        os.kill(pid, signal.SIGCONT)
    for end in ends:
        wait_for(end)
    step = watched.wait_for(StepCommitted).step
    watched.wait_for(StepCommitted, lambda event: event.step > step + 100)
    api.cancel(watched.folder, force=True)
    watched.wait_for_end()
    assert len(watched.all(AttemptStarted)) == 1
    assert len(watched.all(ControllerStarted)) == 2
    assert watched.steps() == list(range(1, watched.steps()[-1] + 1))
    reader = EventReader(watched.folder.events)
    assert len(list(reader.read())) == len(watched.seen)
    assert reader.corrupt_spans == []
    assert "another controller has taken this run over" in watched.folder.controller_log.read_text()


def test_run_continues_at_another_port_when_its_own_was_taken(runs: Runs) -> None:
    watched = runs.steps(100_000, 0.02)
    watched.wait_for(CheckpointCommitted)
    record = json.loads(watched.folder.controller_record.read_text())
    ends = [os.pidfd_open(pid) for pid in (record["supervisor_pid"], watched.all(ControllerStarted)[-1].pid)]
    for end in ends:
        signal.pidfd_send_signal(end, signal.SIGKILL)
        wait_for(end)
    with socket.create_server((record["host"], record["port"])):
        assert api.restart_controller(watched.folder)
        taken = watched.wait_for(FindingRaised, lambda event: event.finding.code == "controller-port-in-use").finding
        step = watched.wait_for(StepCommitted).step
        watched.wait_for(StepCommitted, lambda event: event.step > step + 100)
        watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
        watched.wait_for(ControllerStarted)
        watched.wait_for(StepCommitted)
        api.cancel(watched.folder, force=True)
        watched.wait_for_end()
    codes = watched.codes()
    assert codes.count("controller-port-in-use") == 1, "its successor need not tell it again"
    assert (taken.code, taken.where) == ("controller-port-in-use", f"{record['host']}:{record['port']}")
    assert f"process {os.getpid()} " in taken.evidence[0]
    assert len(watched.all(AttemptStarted)) == 1
    assert watched.steps() == list(range(1, watched.steps()[-1] + 1))
