"""`holdfast accept ladder` runs job files one after the other and compares them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import api
from holdfast.accept.agreement import Agreement
from holdfast.accept.ladder import read_rungs, why_not
from holdfast.accept.site import Site
from holdfast.errors import ExitCode, HoldfastError
from holdfast.job.targets import TargetSpec

EXAMPLES = Path(__file__).parents[2] / "examples" / "ladder"
HOLDFAST = Path(sys.executable).with_name("holdfast")
JOB = "version: 1\nname: rung\ncommand: {command}\nnodes: 2\nranks_per_node: 1\nenv: {{OMP_NUM_THREADS: '1'}}\n"
PROGRAM = f"{sys.executable} {Path(__file__).parents[1] / 'programs' / 'torch_free_trainer.py'} 40 0.02"


def test_each_rung_is_valid_and_runs_where_its_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{HOLDFAST.parent}{os.pathsep}{os.environ['PATH']}")
    site = Site(
        target="local", spec=TargetSpec(), base=EXAMPLES, folder=EXAMPLES, agreement=Agreement(), log=lambda _: None
    )
    reasons = {path.stem: why_not(api.load(path), site, EXAMPLES) for path in read_rungs(EXAMPLES)}
    assert {name: found.code for name, found in reasons.items() if found} == {"5-kueue": "not-used-locally"}


def test_folder_without_job_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError) as refused:
        read_rungs(tmp_path)
    assert refused.value.exit_code is ExitCode.NOT_FOUND


@pytest.mark.slow
def test_rungs_are_compared_with_the_first_and_a_failed_one_decides_the_exit_code(tmp_path: Path, home: Path) -> None:
    (tmp_path / "1-base.yaml").write_text(JOB.format(command=PROGRAM))
    (tmp_path / "2-same.yaml").write_text(JOB.format(command=PROGRAM))
    (tmp_path / "3-broken.yaml").write_text(JOB.format(command=f"{sys.executable} -c 'raise SystemExit(7)'"))
    (tmp_path / "4-queued.yaml").write_text(JOB.format(command=PROGRAM) + "queue: training\n")
    done = subprocess.run(
        [HOLDFAST, "accept", "ladder", ".", "-o", "json"],
        cwd=tmp_path,
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.LADDER_NOT_ACCEPTED, done.stderr
    base, same, broken, queued = json.loads(done.stdout)["rungs"]
    assert (base["status"], same["status"], broken["status"], queued["status"]) == (
        "succeeded",
        "succeeded",
        "failed",
        "not applicable",
    )
    assert 0.01 < base["step_s"] < 2
    assert "[" in same["ratio"]
    assert "exited with code 7" in broken["why"]
    assert "`queue` is not used" in queued["why"]
