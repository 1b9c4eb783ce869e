"""Shipped code: ranks run what was there at the start, wherever they start again, and whatever became of the source."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import TORCH_FREE_TRAINER, Runs, WatchedRun

from holdfast import api
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import (
    CodeShipped,
    ControllerStarted,
    FaultAction,
    FaultTarget,
    Outcome,
    RanksStarted,
    RecoveryDecided,
)
from holdfast.job.run_spec import RunSpec
from holdfast.launch import supervised_target
from holdfast.run_dir import RunDir, runs_root

PROGRAM = """
import os, runpy, sys
import flavour
print(f"{flavour.NAME} in {os.getcwd()}", flush=True)
runpy.run_path("torch_free_trainer.py", run_name="__main__")
"""
COMMAND = (sys.executable, "train.py")


@pytest.fixture
def project(runs: Runs, tmp_path: Path) -> Path:
    """The folder that runs start from, with code in it, and a target that ships it."""
    path = tmp_path / "project"
    targets = path / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "shipped.yaml").write_text("code: shipped\n")
    (path / "train.py").write_text(PROGRAM)
    (path / "flavour.py").write_text("NAME = 'original'\n")
    shutil.copy(TORCH_FREE_TRAINER, path / "torch_free_trainer.py")
    runs.base = path
    return path


def start(
    runs: Runs, steps: int = 60, step_s: float = 0.02, *, target: str = "shipped", overrides: tuple[str, ...] = ()
) -> WatchedRun:
    return runs.start(*COMMAND, str(steps), str(step_s), target=target, overrides=overrides)


def digest(watched: WatchedRun) -> str:
    (shipped,) = watched.all(CodeShipped)
    return shipped.digest


def test_recovered_attempt_runs_the_code_of_a_folder_that_was_deleted(runs: Runs, project: Path) -> None:
    watched = start(runs)
    for _ in range(2):
        watched.wait_for(RanksStarted)
    shutil.rmtree(project)
    watched.drill(FaultTarget.NODE, 1, FaultAction.KILL, at_step=12)
    watched.wait_for(RecoveryDecided)
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(ControllerStarted)) == 2
    told = f"original in {watched.folder.code / digest(watched)}"
    assert [watched.log(rank, attempt).splitlines()[0] for rank in (0, 1) for attempt in (0, 1)] == [told] * 4


def test_run_in_place_ships_nothing(runs: Runs, project: Path) -> None:
    watched = start(runs, 3, target="local")
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.all(CodeShipped) == []
    assert not watched.folder.code.exists()
    assert watched.log(0).splitlines()[0] == f"original in {project}"


def test_ranks_run_in_the_working_directory_below_the_root(runs: Runs, project: Path) -> None:
    (project / "jobs").mkdir()
    (project / "jobs" / "where.py").write_text("import os; print(os.getcwd(), os.listdir('..'))")
    overrides = ("workdir=jobs", "code.root=..", "nodes=1")
    watched = runs.start(sys.executable, "where.py", target="shipped", overrides=overrides)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    cwd, _, beside = watched.log(0).partition(" ")
    assert cwd == f"{watched.folder.code}/{digest(watched)}/jobs"
    assert "flavour.py" in beside


def test_status_summary_and_render_name_the_digest(runs: Runs, project: Path) -> None:
    job = api.load_job(None, command=COMMAND, nodes=2, overrides=("env={A: b}",))
    rendered = api.render(job, "shipped", base=project).text
    watched = start(runs, 3)
    watched.wait_for_end()
    assert f"# sha256: {digest(watched)}" in rendered
    assert re.findall(r"^cd .*$", rendered, re.MULTILINE) == ["cd CODE"] * 2
    assert api.status(watched.folder).code == digest(watched)
    assert api.summary(watched.folder).code == digest(watched)
    assert list(runs_root().glob("*/code/*.tar")) == [watched.folder.code / f"{digest(watched)}.tar"]


def test_code_that_is_too_large_starts_nothing_and_leaves_no_folder(runs: Runs, project: Path) -> None:
    (project / "data.bin").write_bytes(bytes(5000))
    with pytest.raises(HoldfastError) as error:
        start(runs, overrides=("code.max_bytes=4000",))
    assert error.value.exit_code == ExitCode.CANNOT_RUN_HERE
    assert [finding.code for finding in error.value.findings] == ["code-too-large"]
    assert list(runs_root().glob("*")) == []


def test_archive_that_is_damaged_on_its_disk_ends_the_run_with_the_reason(
    runs: Runs, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = supervised_target.start_supervisor

    def damage(run: RunDir, accepted: RunSpec) -> None:
        (archive,) = run.code.glob("*.tar")
        with archive.open("r+b") as file:
            file.seek(600)
            file.write(b"rot")
        real(run, accepted)

    monkeypatch.setattr(supervised_target, "start_supervisor", damage)
    watched = start(runs)
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, ExitCode.UNAVAILABLE)
    assert set(watched.codes()) == {"code-not-delivered"}
    decided = watched.all(RecoveryDecided)
    assert {event.finding.code for event in decided} == {"code-not-delivered"}
    assert "arrived damaged" in decided[-1].finding.evidence[0]


def test_what_ranks_write_beside_the_code_stays_for_the_next_attempt(runs: Runs, project: Path) -> None:
    (project / "count.py").write_text(
        "import os\nold = open('count', 'a+'); old.seek(0); before = old.read()\n"
        "old.write('x')\nold.close()\nbefore or os.kill(os.getpid(), 9)\n"
    )
    watched = runs.start(sys.executable, "count.py", nodes=1, target="shipped")
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert (watched.folder.code / digest(watched) / "count").read_text() == "xx"
    assert not (project / "count").exists()


def test_private_archive_stays_private(runs: Runs, project: Path) -> None:
    watched = start(runs, 3)
    watched.wait_for_end()
    for path in (watched.folder.code, watched.folder.code / f"{digest(watched)}.tar"):
        assert os.stat(path).st_mode & 0o077 == 0
