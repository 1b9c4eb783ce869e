"""The forced end of a run that lies in a folder which several machines share."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import CancelRequested, RunCreated, RunFinished
from holdfast.events.log import EventWriter, last_event
from holdfast.folder import RunFolder
from holdfast.host.files import put, read_object
from holdfast.host.processes import this_machine
from holdfast.launch.keeping import describe
from holdfast.launch.local import force

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
