"""What stands in the way of a job on this machine is said before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import SmallDisk, fill, mount_read_only

from holdfast.findings import Severity
from holdfast.job.isolation import Isolation
from holdfast.job.spec import Job
from holdfast.job.targets import TargetSpec
from holdfast.launch.local import netns
from holdfast.launch.local.local_preflight import LocalMachine, check_locally, run_checks

pytestmark = pytest.mark.usefixtures("home")


def codes(
    base: Path,
    environ: dict[str, str] | None = None,
    isolation: Isolation = Isolation.PROCESS,
    gpus: int = 0,
    mpi: str = "",
    open_files: int = 1024,
    capacity: int | None = None,
    unlimited: str = "",
    **fields: Any,
) -> list[str]:
    """Codes for a job on a machine with 2 cores and 4 GiB."""
    job = Job.model_validate({"command": ["sh", "-c", "true"], **fields})
    here = LocalMachine(
        base=base,
        environ=environ or {"PATH": "/bin"},
        isolation=isolation,
        cpus=2,
        memory=4 * 2**30,
        gpus=gpus,
        mpi_version=mpi,
        open_files=open_files,
        capacity=capacity,
        memory_unlimited_reason=unlimited,
    )
    return [finding.code for finding in run_checks(job, here)]


def test_ordinary_job_possible(tmp_path: Path) -> None:
    assert codes(tmp_path, gpus=2, nodes=2, gpus_per_node=1, resources={"cpu": 1}) == []


def test_memory_that_nodes_cannot_be_held_to_is_said(tmp_path: Path) -> None:
    asked = {"memory": "2GiB"}
    assert codes(tmp_path, nodes=2, resources=asked) == []
    assert codes(tmp_path, nodes=2, resources=asked, unlimited="no group") == ["not-enforced-locally"]
    assert codes(tmp_path, nodes=3, resources=asked) == ["too-little-memory"]


def test_too_few_open_files_for_so_many_nodes_or_ranks_refused(tmp_path: Path) -> None:
    assert codes(tmp_path, nodes=4, ranks_per_node=1, open_files=112) == []
    assert codes(tmp_path, nodes=5, open_files=112) == ["too-few-open-files"]
    assert codes(tmp_path, ranks_per_node=5, open_files=112) == ["too-few-open-files"]


@pytest.mark.root
def test_full_and_read_only_disks_are_found_before_anything_starts(
    tmp_path: Path, small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk(128 << 10)
    assert codes(tmp_path, checkpoint=str(disk / "checkpoints")) == []
    fill(disk)
    assert codes(tmp_path, checkpoint=str(disk / "checkpoints")) == ["disk-full"]
    mount_read_only(disk)
    monkeypatch.setenv("HOLDFAST_HOME", str(disk))
    assert codes(tmp_path) == ["read-only-file-system"]


def test_workdir_missing_or_a_file_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert codes(tmp_path, workdir="none") == ["missing-workdir"]
    assert codes(tmp_path, workdir="file") == ["missing-workdir"]


def test_program_looked_up_as_a_rank_would(tmp_path: Path) -> None:
    tool = tmp_path / "work" / "bin" / "tool"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    assert codes(tmp_path, workdir="work", command=["bin/tool"]) == ["not-executable"]
    tool.chmod(0o755)
    assert codes(tmp_path, workdir="work", command=["bin/tool"]) == []
    assert codes(tmp_path, workdir="work", command=["tool"]) == ["missing-program"]
    assert codes(tmp_path, workdir="work", command=["tool"], env={"PATH": str(tool.parent)}) == []
    assert codes(tmp_path, workdir="work", command=["tool"], env={"PATH": "bin"}) == []
    assert codes(tmp_path, workdir="work", command=["sh"], env={"PATH": "bin"}) == ["missing-program"]


def test_python_script_missing_refused(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    path = {"PATH": str(tmp_path)}
    assert codes(tmp_path, path, command=["python3", "train.py"]) == ["missing-script"]
    assert codes(tmp_path, path, command=["python3", "-m", "train"]) == []
    (tmp_path / "train.py").touch()
    assert codes(tmp_path, path, command=["python3", "train.py"]) == []


def test_folders_that_cannot_be_made_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert codes(tmp_path, checkpoint="out/deep") == []
    assert codes(tmp_path, checkpoint="file/out") == ["unwritable-folder"]
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "file"))
    assert codes(tmp_path) == ["unwritable-folder"]


def test_storage_of_the_target_matters_to_jobs_that_name_no_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, expected in ((None, ["unwritable-folder"]), ("out", [])):
        job = Job.model_validate({"command": "true", "checkpoint": {"path": path}})
        findings = check_locally(job, TargetSpec(checkpoint_root="file/deep"), base=tmp_path, environ={"PATH": "/bin"})
        assert [finding.code for finding in findings if finding.severity is Severity.ERROR] == expected


def test_more_than_the_machine_has_refused(tmp_path: Path) -> None:
    assert codes(tmp_path, gpus=2, nodes=3, gpus_per_node=1) == ["too-few-gpus"]
    assert codes(tmp_path, nodes=3, resources={"memory": "2GiB"}) == ["too-little-memory"]
    assert codes(tmp_path, nodes=3, resources={"cpu": 1}) == ["too-few-cpus"]
    assert codes(tmp_path, nodes=65) == ["too-many-ranks"]
    assert codes(tmp_path, ranks_per_node=65) == ["too-many-ranks"]
    assert codes(tmp_path, ranks_per_node=65, launch="per-node") == []


def test_deepspeed_nodes_that_would_share_gpus_refused(tmp_path: Path) -> None:
    fields = {"gpus": 2, "gpus_per_node": 1, "launch": "deepspeed"}
    assert codes(tmp_path, nodes=2, **fields) == ["deepspeed-gpu-numbering"]
    assert codes(tmp_path, nodes=1, **fields) == []
    assert codes(tmp_path, nodes=2, launch="deepspeed") == []


@pytest.mark.parametrize(
    ("nodes", "capacity", "expected"),
    [
        (2, 2, []),
        (2, 1, ["too-few-nodes"]),
        ("2..3", 3, []),
        ("2..3", 2, ["starts-with-fewer-nodes"]),
        ("2..3", 1, ["too-few-nodes"]),
    ],
)
def test_target_with_few_machines_is_reported(
    tmp_path: Path, nodes: int | str, capacity: int, expected: list[str]
) -> None:
    assert codes(tmp_path, nodes=nodes, capacity=capacity) == expected


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("mpirun (Open MPI) 4.1.4", []),
        ("mpiexec (OpenRTE) 4.1.4", []),
        ("mpirun (Open MPI) 5.0.7", ["not-open-mpi-4"]),
        ("HYDRA build details:", ["not-open-mpi-4"]),
    ],
)
def test_mpi_that_takes_nothing_from_variables_refused(tmp_path: Path, says: str, expected: list[str]) -> None:
    assert codes(tmp_path, launch="mpi", mpi=says) == expected
    assert codes(tmp_path, mpi=says) == []


def test_mpirun_asked_for_its_version(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.7'\n")
    program.chmod(0o755)
    for command in ("./mpirun", "mpirun"):
        job = Job.model_validate({"command": [command, "train"], "launch": "mpi"})
        found = check_locally(job, TargetSpec(), base=tmp_path, environ={"PATH": f"{tmp_path}:/bin"})
        assert [finding.code for finding in found if finding.severity is Severity.ERROR] == ["not-open-mpi-4"]


def test_secret_without_its_source_refused(tmp_path: Path) -> None:
    secrets = {"A": {"env": "MY_A"}, "B": {"file": "b"}}
    assert codes(tmp_path, secrets=secrets) == ["missing-secret", "missing-secret"]
    (tmp_path / "b").write_text("x")
    assert codes(tmp_path, {"PATH": "/bin", "MY_A": "x"}, secrets=secrets) == []


def test_fields_of_clusters_told_not_to_be_used(tmp_path: Path) -> None:
    fields = {"image": "x", "queue": "y", "resources": {"shm": 1}}
    assert codes(tmp_path, **fields) == ["not-used-locally"] * 3


def test_namespaces_that_the_kernel_forbids_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "unavailable", lambda: "the kernel says no")
    assert codes(tmp_path, isolation=Isolation.NETNS) == ["no-netns"]
    assert codes(tmp_path, isolation=Isolation.PROCESS) == []
    monkeypatch.setattr(netns, "unavailable", lambda: None)
    assert codes(tmp_path, isolation=Isolation.NETNS) == []


def test_gpus_that_nobody_asked_for_told(tmp_path: Path) -> None:
    assert codes(tmp_path, gpus=2) == ["gpus-not-requested"]
    assert codes(tmp_path, gpus=2, gpus_per_node=1) == []


def test_this_machine_described_by_itself(tmp_path: Path) -> None:
    job = Job.model_validate({"command": ["sh"], "nodes": 100_000, "resources": {"memory": "1P"}})
    findings = check_locally(job, TargetSpec(), base=tmp_path, environ={"PATH": "/bin"})
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    assert [finding.code for finding in errors] == ["too-little-memory", "too-many-ranks"]
    assert all(finding.remedy for finding in errors)
