"""The file of quarantined machines: private, changed by one process at a time, and never lost when damaged."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.findings import Finding, Owner
from holdfast.job.quarantine import Candidate, Certainty, MachineEvidence, Quarantine, release
from holdfast.launch.machine_pool import MachinePool
from holdfast.launch.quarantine_file import QuarantineFile, quarantine_path, remember
from holdfast.run_dir import RunDir

FINDING = Finding(code="gpu-failed", what="its GPU failed", evidence=("Xid 79",), owner=Owner.CLUSTER)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))


def candidate(machine: str) -> Candidate:
    evidence = MachineEvidence(certainty=Certainty.CERTAIN, finding=FINDING)
    return Candidate(machine=machine, run=f"{machine}-aaaaaa", evidence=evidence)


def machines(file: QuarantineFile) -> set[str]:
    return {row.machine for row in file.read()[0].rows}


def test_row_is_kept_privately_and_apart_for_each_target() -> None:
    (told,) = remember(QuarantineFile("local"), candidate("m7"), machines=4, target="local")
    assert told.code == "machine-quarantined"
    assert machines(QuarantineFile("local")) == {"m7"}
    assert machines(QuarantineFile("other")) == set()
    path = quarantine_path("local")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


WRITER = """
import sys
from tests.launch.test_quarantine_file import candidate
from holdfast.launch.quarantine_file import QuarantineFile, remember
sys.stdin.readline()
for number in range(40):
    remember(QuarantineFile("local"), candidate(f"{sys.argv[1]}{number}"), machines=1000, target="local")
"""


def test_two_processes_that_write_at_once_lose_nothing() -> None:
    root = Path(__file__).parents[2]
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, name], stdin=subprocess.PIPE, cwd=root, text=True)
        for name in ("a", "b")
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
    assert machines(QuarantineFile("local")) == {f"{name}{number}" for name in "ab" for number in range(40)}


def test_run_in_progress_uses_released_machines_again(tmp_path: Path) -> None:
    file = QuarantineFile("racks")
    remember(file, candidate("m7"), machines=30, target="racks")
    pool = MachinePool(RunDir(tmp_path / "run-bbbbbb"), ("m7", "m8", "m9"), have_names=True, quarantine=file)
    assert pool.avoid("m8", ())
    remember(file, candidate("m8"), machines=30, target="racks")
    assert pool.free(()) == ["m9"]
    for machine in ("m7", "m8"):
        file.change(lambda known, machine=machine: release(known, machine, time.time()) or known)
    assert pool.free(()) == ["m7", "m8", "m9"]


def test_damaged_file_is_a_finding_and_its_content_is_kept() -> None:
    path = quarantine_path("local")
    path.parent.mkdir(parents=True)
    damaged = (
        b"",
        b"{",
        b"[]",
        b'{"rows": 7}',
        b'{"format": 99, "rows": []}',
        b"\xff\xfe",
        b'{"rows": [{"machine": 1}]}',
    )
    for number, content in enumerate(damaged, 1):
        path.write_bytes(content)
        known, (told,) = QuarantineFile("local").read()
        assert (known, told.code, told.where) == (Quarantine(), "quarantine-unreadable", str(path)), content
        assert path.read_bytes() == content, "reading changes nothing"
        told, row = remember(QuarantineFile("local"), candidate("m7"), machines=4, target="local")
        assert (told.code, row.code) == ("quarantine-unreadable", "machine-quarantined"), content
        kept = path.with_name(f"{path.name}.damaged-{number}")
        assert kept.read_bytes() == content
        assert str(kept) in told.what
        assert machines(QuarantineFile("local")) == {"m7"}
    path.unlink()
    os.mkfifo(path)
    assert QuarantineFile("local").read()[1][0].code == "quarantine-unreadable"
    remember(QuarantineFile("local"), candidate("m7"), machines=4, target="local")
    assert machines(QuarantineFile("local")) == {"m7"}


def test_folder_that_cannot_be_written_raises(tmp_path: Path) -> None:
    (tmp_path / "quarantine").write_text("no folder")
    with pytest.raises(OSError, match="quarantine"):
        remember(QuarantineFile("local"), candidate("m7"), machines=4, target="local")
