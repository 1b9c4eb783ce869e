"""The supervisor's patience, and what it does when that is at an end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ExitCode
from holdfast.events import Outcome, RunFinished
from holdfast.events.log_writer import EventWriter
from holdfast.launch.controller_supervisor import RestartBackoff
from holdfast.launch.monarch.client_process import LOG_NAME, client_folder
from holdfast.run_dir import RunDir


def paces(*lives: tuple[float, float]) -> list[RestartBackoff]:
    """The pace after each of these lives, from start to end."""
    found = [RestartBackoff(grace_s=1800)]
    for started, ended in lives:
        found.append(found[-1].after_exit(started, ended))
    return found[1:]


def test_first_controllers_follow_at_once_and_later_ones_after_ever_longer_pauses() -> None:
    pauses = [pace.delay_s for pace in paces(*((float(at), at + 1.0) for at in range(12)))]
    assert pauses == [0, 0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10]


def test_controller_that_lasts_makes_all_well() -> None:
    *_, last = paces((0, 1), (1, 2), (2, 3), (3, 4), (4, 20))
    assert last == RestartBackoff(grace_s=1800)
    (first,) = paces((0, 4000))
    assert not first.gave_up(4000)


def test_run_given_up_when_no_controller_lasted_for_the_jobs_grace() -> None:
    *_, last = paces((0, 5), (5, 6), (16, 17))
    assert not last.gave_up(1804)
    assert last.gave_up(1805)


def keep(folder: RunDir, *options: str) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-m", "holdfast.launch.local.local_supervisor", str(folder.path), "--isolation", "process"]
    return subprocess.run([*argv, *options], timeout=200, check=False, capture_output=True)


@pytest.mark.slow
def test_run_given_up_leaves_neither_secrets_nor_socket(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.job.write_text(json.dumps({"job": {"recovery": {"controller_grace_s": 0.1}}}))
    folder.secrets.write_text("{}")
    assert keep(folder).returncode == ExitCode.STORAGE_FAILED
    assert folder.controller_log.read_text().count("run-file-corrupt") >= 2
    assert not folder.secrets.exists()
    assert not folder.control_socket.exists()


def test_run_that_is_finished_needs_no_secrets_to_end(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.job.write_text(json.dumps({"job": {}}))
    writer = EventWriter(folder.events)
    writer.append([RunFinished(at=0.0, outcome=Outcome.SUCCEEDED, exit_code=0, reason="")])
    writer.close()
    (tmp_path / "nodes" / "node0.0").mkdir(parents=True)
    (tmp_path / "nodes" / "node0.0" / "agent.json").write_text('{"pid": 1')
    done = keep(folder)
    assert (done.returncode, done.stderr) == (0, b"")
    assert folder.controller_log.read_text() == ""


def test_run_begins_although_the_system_refuses_what_should_start_with_its_supervisor(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.job.write_text(json.dumps({"job": {}}))
    writer = EventWriter(folder.events)
    writer.append([RunFinished(at=0.0, outcome=Outcome.SUCCEEDED, exit_code=0, reason="")])
    writer.close()
    (client_folder(folder) / LOG_NAME).mkdir(parents=True)
    done = keep(folder, "--prestart", "holdfast.launch.monarch.client_process")
    assert done.returncode == 0  # the controller's
    assert b"Is a directory" in done.stderr
    assert b"Traceback" not in done.stderr
