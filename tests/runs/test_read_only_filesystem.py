"""The file system of a run's folder makes itself read-only in the middle, as ext4 does after an error of its disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runs.conftest import Runs
from tests.runs.test_resource_faults import holds, noted
from tests.waiting import until

from holdfast import api
from holdfast.events import AttemptStarted, CheckpointCommitted, ControllerStarted, Outcome, StepCommitted
from holdfast.run_dir import RunDir

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A small ext4 that becomes read-only after an error."""
    image, folder = tmp_path / "ext4.img", tmp_path / "ext4"
    folder.mkdir()
    subprocess.run(["truncate", "-s", "32M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=False)


def fail(folder: Path) -> None:
    """Have it meet an error, once what was made before is on disk: a folder that is not cannot be read again."""
    subprocess.run(["sync", "--file-system", folder], check=True)
    device = subprocess.run(["findmnt", "-no", "SOURCE", folder], check=True, capture_output=True, text=True).stdout
    Path("/sys/fs/ext4", Path(device.strip()).name, "trigger_fs_error").write_text("a test")


def mend(folder: Path) -> None:
    """Put a file system that can be written in its place, with all that is in it."""
    aside = folder.with_name("aside")
    shutil.copytree(folder, aside, symlinks=True, ignore=shutil.ignore_patterns("*.sock", "lost+found"))
    subprocess.run(["umount", "--lazy", folder], check=True)
    for path in aside.iterdir():
        shutil.move(path, folder)


def end_controller(run: RunDir, controller: int) -> None:
    """Kill supervisor and controller, as when their machine is lost."""
    supervisor: int = json.loads(run.controller_record.read_text())["supervisor_pid"]
    for pid in (supervisor, controller):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not run.alive())


def test_run_waits_is_said_to_and_continues_without_a_restart_once_it_can_be_written(
    runs: Runs, ext4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(ext4))
    watched = runs.steps(100_000, 0.02, overrides=(f"checkpoint.path={runs.base / 'checkpoints'}",))
    watched.wait_for(CheckpointCommitted)
    fail(ext4)
    until(lambda: holds(watched))
    found = api.storage_finding(watched.folder)
    assert found is not None
    assert found.code == "read-only-file-system"
    begun = noted(runs)
    until(lambda: noted(runs) >= begun + 100)
    end_controller(watched.folder, watched.all(ControllerStarted)[-1].pid)
    mend(ext4)
    assert api.restart_controller(watched.folder)
    watched.wait_for(StepCommitted, lambda event: event.step >= begun + 100)
    api.cancel(watched.folder, force=True)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    assert (len(watched.all(AttemptStarted)), len(watched.all(ControllerStarted))) == (1, 2)
    assert watched.steps() == list(range(1, max(watched.steps()) + 1))
    assert max(watched.steps()) <= noted(runs)
