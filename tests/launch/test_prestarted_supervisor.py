"""A supervisor and its controller that start before their run is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import until

from holdfast import api
from holdfast.events import Outcome, RunFinished
from holdfast.events.log_writer import EventWriter
from holdfast.host.processes import children, command_line, identify
from holdfast.launch import prestarted_supervisor
from holdfast.launch.local.force_cancel import end_processes
from holdfast.launch.prestarted_supervisor import SUPERVISOR
from holdfast.launch.waiting_controller import ExpectedTarget
from holdfast.run_dir import RunDir

BIN = Path(sys.executable).parent


@pytest.fixture
def waiting() -> subprocess.Popen[bytes]:
    """A supervisor that has no run yet."""
    prestarted_supervisor._prestarted.process = None  # what another test of this process has left
    prestarted_supervisor.prestart()
    found = prestarted_supervisor._prestarted.process
    assert found is not None
    yield found
    prestarted_supervisor._prestarted.process = None
    if found.stdin is not None:
        found.stdin.close()
    found.wait(60)


def finished(tmp_path: Path) -> RunDir:
    folder = RunDir(tmp_path / "job-abc234")
    folder.path.mkdir()
    folder.job.write_text(json.dumps({"job": {}}))
    writer = EventWriter(folder.events)
    writer.append([RunFinished(at=0.0, outcome=Outcome.SUCCEEDED, exit_code=0, reason="")])
    writer.close()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "isolation", ["process", pytest.param("netns", marks=[pytest.mark.root, pytest.mark.needs("ip")])]
)
def test_prestarted_supervisor_takes_over_a_run(tmp_path: Path, waiting, isolation: str) -> None:
    folder = finished(tmp_path)
    words = (SUPERVISOR, str(folder.path), "--isolation", isolation)
    begun = prestarted_supervisor.begin(words, os.environ, folder.controller_log)
    assert begun is waiting
    assert begun.wait(60) == 0, folder.controller_log.read_text()
    assert folder.controller_log.read_text() == ""


def test_supervisor_that_gets_no_run_ends_with_its_controller(waiting) -> None:
    until(lambda: children(waiting.pid))
    (controller,) = map(identify, children(waiting.pid))
    assert controller is not None
    assert waiting.stdin is not None
    waiting.stdin.close()
    assert waiting.wait(60) == 0
    until(lambda: not controller.alive)


def test_run_does_not_need_the_supervisor_that_has_died(tmp_path: Path, waiting) -> None:
    folder = finished(tmp_path)
    waiting.kill()
    waiting.wait()
    words = (SUPERVISOR, str(folder.path), "--isolation", "process")
    assert prestarted_supervisor.begin(words, os.environ, folder.controller_log).wait(60) == 0


def test_supervisor_of_another_kind_starts_by_itself(tmp_path: Path, waiting) -> None:
    words = ("holdfast.launch.kubernetes.sync.run_sync", "--help")
    assert prestarted_supervisor.begin(words, os.environ, tmp_path / "log") is not waiting
    assert waiting.poll() is None


def test_supervisor_that_connects_hosts_ends_if_the_run_is_on_none(tmp_path: Path) -> None:
    prestarted_supervisor._prestarted.process = None  # what another test of this process has left
    prestarted_supervisor.prestart(ExpectedTarget(target=tmp_path / "none.yaml", base=tmp_path))
    waiting = prestarted_supervisor._prestarted.process
    assert waiting is not None
    folder = finished(tmp_path)
    words = (SUPERVISOR, str(folder.path), "--isolation", "process")
    begun = prestarted_supervisor.begin(words, os.environ, folder.controller_log)
    assert begun is not waiting
    assert (begun.wait(60), waiting.wait(60)) == (0, 0)


@pytest.mark.slow
def test_controller_that_waited_for_its_run_is_found_by_its_folder(home: Path, tmp_path: Path) -> None:
    command = (str(BIN / "holdfast"), "run", "-d", "--", sys.executable, "-c", "import time; time.sleep(600)")
    subprocess.run(command, cwd=tmp_path, check=True)
    (run,) = api.runs()
    supervisor = run.read_controller_record()["supervisor_pid"]
    (controller,) = children(supervisor)
    assert f"{SUPERVISOR} {run.path} --isolation process" in command_line(supervisor)
    until(lambda: f"holdfast.controller_main {run.path} " in command_line(controller))
    os.kill(supervisor, 9)
    end_processes(run)
    assert not run.alive()
    assert identify(controller) is None
