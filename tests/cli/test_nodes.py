"""`holdfast nodes` lists a target's machines with what is held against them, and releases them."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import ExitCode
from holdfast.findings import Finding, Owner
from holdfast.job.quarantine import Candidate, Certainty, MachineEvidence
from holdfast.launch.quarantine_file import QuarantineFile, quarantine_path, remember

if TYPE_CHECKING:
    from tests.cli.conftest import Cli


@pytest.fixture(autouse=True)
def _target(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".holdfast" / "targets"
    folder.mkdir(parents=True)
    (folder / "four.yaml").write_text("capacity: 4\n")
    monkeypatch.chdir(tmp_path)


def quarantine(machine: str) -> None:
    finding = Finding(code="gpu-failed", what="its GPU failed", evidence=("Xid 79",), owner=Owner.CLUSTER)
    evidence = MachineEvidence(certainty=Certainty.CERTAIN, finding=finding)
    candidate = Candidate(machine=machine, run="demo-k3m9tz", evidence=evidence)
    remember(QuarantineFile("four"), candidate, machines=4, target="four")


def test_quarantined_machine_is_listed_with_its_evidence_and_released(cli: Cli) -> None:
    quarantine("machine2")
    answer = cli("nodes", "--on", "four")
    lines = [line.split() for line in answer.out.splitlines()]
    assert answer.code == ExitCode.OK
    assert [words[:2] for words in lines[1:5]] == [
        ["machine0", "free"],
        ["machine1", "free"],
        ["machine2", "quarantined"],
        ["machine3", "free"],
    ]
    assert "gpu-failed in demo-k3m9tz: Xid 79" in answer.out
    assert answer.out.endswith("1 of 4 quarantined, 1 at most\n")
    data = cli("nodes", "--on", "four", "-o", "json").data
    (bad,) = (each for each in data["machines"] if each["state"] == "quarantined")
    assert (data["target"], data["limit"], bad["name"]) == ("four", 1, "machine2")
    assert (bad["quarantine"]["run"], bad["quarantine"]["evidence"]) == ("demo-k3m9tz", ["Xid 79"])
    assert bad["quarantine"]["until"] > time.time() + 6 * 86400
    released = cli("nodes", "--on", "four", "--release", "machine2")
    assert (released.code, released.out) == (ExitCode.OK, "machine2 released: runs on four may use it\n")
    assert "quarantined" not in cli("nodes", "--on", "four").out
    again = cli("nodes", "--on", "four", "--release", "machine2", "-o", "json")
    assert again.code == ExitCode.NOT_FOUND
    assert "machine-not-quarantined" in again.out + again.err


def test_start_and_validation_say_what_is_avoided_and_refuse_a_job_that_lacks_machines(cli: Cli) -> None:
    quarantine("machine2")
    Path("job.yaml").write_text("name: demo\ncommand: 'true'\nnodes: 2\n")
    answer = cli("validate", "--on", "four")
    assert answer.code == ExitCode.OK
    assert "1 of 4 machines of four is quarantined: runs avoid it" in answer.out + answer.err
    refused = cli("validate", "--on", "four", "--set", "nodes=4")
    assert refused.code == ExitCode.CANNOT_RUN_HERE
    told = refused.out + refused.err
    assert "the target has a `capacity` of 4, of which 1 quarantined" in told
    assert "holdfast nodes --release machine2 --on four" in told


def test_one_machine_without_runs_is_free_and_a_damaged_quarantine_is_a_finding(cli: Cli) -> None:
    path = quarantine_path("local")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    answer = cli("nodes")
    assert answer.code == ExitCode.OK
    assert answer.out.splitlines()[1].split() == [socket.gethostname(), "free"]
    assert "quarantine-unreadable" in answer.out
    assert path.read_text() == "{"
