"""The forced end of a run that lies in a folder which several machines share."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import CancelRequested, RunCreated, RunFinished
from holdfast.events.log import EventWriter, last_event
from holdfast.folder import RunFolder
from holdfast.host.cgroups import PREFIX, note
from holdfast.host.files import put, read_object
from holdfast.host.processes import this_machine
from holdfast.launch.keeping import describe
from holdfast.launch.local import force, memory_limit, sockets

REQUEST = CancelRequested(at=2.0, force=True)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that was begun here."""
    folder = RunFolder(tmp_path / "test-abc234")
    folder.node(0, 0).mkdir(parents=True)
    folder.secrets.write_text("{}")
    (folder.node(0, 0) / "token").write_text("secret")
    writer = EventWriter(folder.events)
    writer.append([RunCreated(at=1.0, run=folder.run, job={})])
    writer.close()
    describe(folder)
    return folder


def names(run: RunFolder, **machine: str) -> None:
    """Have its record name another machine."""
    put(run.controller, json.dumps(read_object(run.controller) | machine).encode())


def refused(run: RunFolder) -> str:
    """The evidence of a refusal that has changed nothing."""
    before = run.events.read_bytes()
    with pytest.raises(HoldfastError) as raised:
        force.end(run, REQUEST)
    (finding,) = raised.value.findings
    assert (finding.code, raised.value.exit_code) == ("run-elsewhere", ExitCode.UNAVAILABLE)
    assert run.events.read_bytes() == before
    assert run.secrets.exists()
    assert (run.node(0, 0) / "token").exists()
    return finding.evidence[0]


def test_run_of_another_machine_is_not_ended_from_here_and_one_from_before_a_reboot_is(run: RunFolder) -> None:
    names(run, hostname="elsewhere", boot="another")
    assert "elsewhere" in refused(run)
    names(run, hostname=this_machine()["hostname"])
    force.end(run, replace(REQUEST, by="test"))
    assert isinstance(last_event(run.events), RunFinished)
    assert not run.secrets.exists()


def test_run_whose_lock_somebody_out_of_reach_holds_is_left_alone(run: RunFolder) -> None:
    lock = run.lock()
    assert lock is not None
    try:
        assert "lock is held" in refused(run)
    finally:
        os.close(lock)


def test_copy_of_a_runs_folder_owns_nothing_of_that_run(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    node = run.node(0, 0)
    made = sockets.make(node)
    for number, name in enumerate((f"{run.run}-0.0", f"{run.run}-0-0-3-{os.getpid()}", f"{run.run}-1.0")):
        group = tmp_path / f"{PREFIX}{name}"
        group.mkdir()
        (group / "cgroup.procs").write_text(f"{100 + number}")
        note(node, group, f"-{number}")
    copy = RunFolder(tmp_path / f"{run.run}-copy")
    shutil.copytree(run.path, copy.path, symlinks=True)
    try:
        assert memory_limit.processes(copy.node(0, 0)) == []
        sockets.remove(copy.node(0, 0))
        assert made.is_dir()
        assert memory_limit.processes(node) == [100, 101]
    finally:
        sockets.remove(node)
    assert not made.exists()
