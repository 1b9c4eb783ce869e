"""The forced end of a run that lies in a folder which several machines share."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import CancelRequested, RunCreated, RunFinished
from holdfast.events.log import last_event
from holdfast.events.log_writer import EventWriter
from holdfast.host.cgroups import PREFIX, record_group
from holdfast.host.files import atomic_write, read_object
from holdfast.host.processes import machine_id
from holdfast.launch.controller_supervisor import write_controller_record
from holdfast.launch.local import force_cancel, memory_limit, socket_dir
from holdfast.run_dir import RunDir

REQUEST = CancelRequested(at=2.0, force=True)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was begun here."""
    folder = RunDir(tmp_path / f"test-{secrets.token_hex(3)}")  # its processes are found by this name
    folder.node_dir(0, 0).mkdir(parents=True)
    folder.secrets.write_text("{}")
    (folder.node_dir(0, 0) / "token").write_text("secret")
    writer = EventWriter(folder.events)
    writer.append([RunCreated(at=1.0, run=folder.run_id, job={})])
    writer.close()
    write_controller_record(folder)
    return folder


def names(run: RunDir, **machine: str) -> None:
    """Have its record name another machine."""
    atomic_write(run.controller_record, json.dumps(read_object(run.controller_record) | machine).encode())


def refused(run: RunDir) -> str:
    """The evidence of a refusal that has changed nothing."""
    before = run.events.read_bytes()
    with pytest.raises(HoldfastError) as raised:
        force_cancel.force_cancel(run, REQUEST)
    (finding,) = raised.value.findings
    assert (finding.code, raised.value.exit_code) == ("run-on-another-host", ExitCode.UNAVAILABLE)
    assert run.events.read_bytes() == before
    assert run.secrets.exists()
    assert (run.node_dir(0, 0) / "token").exists()
    return finding.evidence[0]


def test_run_of_another_machine_is_not_ended_from_here_and_one_from_before_a_reboot_is(run: RunDir) -> None:
    names(run, hostname="elsewhere", boot="another")
    assert "elsewhere" in refused(run)
    names(run, hostname=machine_id()["hostname"])
    force_cancel.force_cancel(run, replace(REQUEST, requested_by="test"))
    assert isinstance(last_event(run.events), RunFinished)
    assert not run.secrets.exists()


def test_run_whose_lock_somebody_out_of_reach_holds_is_left_alone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(force_cancel, "UNLOCK_TIMEOUT_S", 0.1)
    lock = run.lock()
    assert lock is not None
    try:
        assert "lock is held" in refused(run)
    finally:
        os.close(lock)


def test_copy_of_a_runs_folder_owns_nothing_of_that_run(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    node = run.node_dir(0, 0)
    made = socket_dir.create(node)
    for number, name in enumerate((f"{run.run_id}-0.0", f"{run.run_id}-0-0-3-{os.getpid()}", f"{run.run_id}-1.0")):
        group = tmp_path / f"{PREFIX}{name}"
        group.mkdir()
        (group / "cgroup.procs").write_text(f"{100 + number}")
        record_group(node, group, f"-{number}")
    copy = RunDir(tmp_path / f"{run.run_id}-copy")
    shutil.copytree(run.path, copy.path, symlinks=True)
    try:
        assert memory_limit.processes(copy.node_dir(0, 0)) == []
        socket_dir.remove(copy.node_dir(0, 0))
        assert made.is_dir()
        assert memory_limit.processes(node) == [100, 101]
    finally:
        socket_dir.remove(node)
    assert not made.exists()


def test_lock_of_a_process_that_is_about_to_end_is_waited_for(run: RunDir) -> None:
    """The kernel closes a killed process's files after it has forgotten the command line by which it is found."""
    lock = run.lock()
    assert lock is not None
    released = threading.Timer(0.2, os.close, (lock,))
    released.start()
    force_cancel.end_processes(run)
    released.join()
    assert not run.alive()
