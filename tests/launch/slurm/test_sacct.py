"""What Slurm accounted for a run, from the output of two releases' sacct, and from none."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from holdfast.launch.slurm import sacct
from holdfast.launch.slurm.sacct import BEFORE_S, accounted, parse_jobs
from holdfast.report.run_figures import report_document, report_markdown
from holdfast.report.run_record import RunRecord
from holdfast.report.run_status import RunStatus

# Job 6 lost n1 and kept n2; then it lost n2 as well, and Slurm has requeued it.
V24_11 = """\
1|COMPLETED|0:0|1795893229|1795893231|1795893233|2|2|n[1,3]|billing=2,cpu=2,gres/gpu=2,node=2|0
2|CANCELLED by 0|0:0|1795893233|1795893233|1795893234|1|2|n[1,3]|billing=2,cpu=2,gres/gpu=2,node=2|0
3|PREEMPTED|0:0|1795893234|1795893235|1795893235|0|2|n[1,3]|billing=2,cpu=2,gres/gpu=2,node=2|0
5|FAILED|3:0|1795893237|1795893237|1795893237|0|1|n2|billing=1,cpu=1,node=1|0
6|RESIZING|0:0|1795893238|1795893238|1795893265|27|2|n[1-2]|billing=2,cpu=2,gres/gpu=2,node=2|
6|NODE_FAIL|1:0|1795893265|1795893265|1795893359|94|1|n2|billing=1,cpu=1,gres/gpu=1,node=1|0
7|PENDING|0:0|1795893330|Unknown|Unknown|0|0|None assigned||0
6|PENDING|0:0|1795893359|Unknown|Unknown|0|1|None assigned|billing=1,cpu=1,gres/gpu=1,node=1|0
"""
V22_05 = """\
1|COMPLETED|0:0|1795893230|1795893231|1795893232|1|2|n[1,3]|billing=2,cpu=2,node=2|0
2|CANCELLED by 0|0:0|1795893233|1795893233|1795893234|1|2|n[1,3]|billing=2,cpu=2,node=2|0
3|FAILED|15:0|1795893235|1795893235|1795893236|1|2|n[1,3]|billing=2,cpu=2,node=2|0
5|FAILED|3:0|1795893238|1795893239|1795893239|0|1|n2|billing=1,cpu=1,node=1|
7|COMPLETED|0:0|1795893302|1795893303|1795893304|1|3|n[1-3]|billing=6,cpu=6,node=3|
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script that is run as `sacct`; there is none yet."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "sacct"


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_every_stretch_of_a_job_is_read() -> None:
    jobs = parse_jobs(V24_11)
    assert [(each.job, each.state, each.nodes, each.node_names, each.node_s, each.gpu_s) for each in jobs] == [
        ("1", "COMPLETED", 2, "n[1,3]", 4, 4),
        ("2", "CANCELLED by 0", 2, "n[1,3]", 2, 2),
        ("3", "PREEMPTED", 2, "n[1,3]", 0, 0),
        ("5", "FAILED", 1, "n2", 0, 0),
        ("6", "RESIZING", 2, "n[1-2]", 54, 54),
        ("6", "NODE_FAIL", 1, "n2", 94, 94),
        ("7", "PENDING", 0, "", 0, 0),
        ("6", "PENDING", 0, "", 0, 0),
    ]
    assert jobs[0].resources == {"cpu": "2", "gres/gpu": "2"}
    assert (jobs[0].submitted_at, jobs[0].started_at, jobs[0].ended_at) == (1795893229, 1795893231, 1795893233)
    assert (jobs[-1].started_at, jobs[-1].ended_at) == (None, None)


def test_older_release_says_the_same() -> None:
    jobs = parse_jobs(V22_05)
    assert [(each.job, each.state, each.node_s) for each in jobs] == [
        *(("1", "COMPLETED", 2), ("2", "CANCELLED by 0", 2), ("3", "FAILED", 2), ("5", "FAILED", 0)),
        ("7", "COMPLETED", 3),
    ]
    assert {each.energy_j for each in jobs} == {None}


def test_lines_of_steps_and_other_text_are_left_out() -> None:
    step = "1.0|COMPLETED|0:0|1795893231|1795893231|1795893232|1|2|n[1,3]|cpu=2,mem=0,node=2|0"
    assert parse_jobs(f"{step}\nsacct: error: something\n1|RUNNING\n") == ()


def test_report_shows_jobs_and_their_sum(said: Path) -> None:
    metered = V24_11.replace("node=2|0", "node=2|7200000", 1)
    write_program(said, f"echo '{metered.rstrip()}'")
    record = RunRecord(status=RunStatus(run="demo"), scheduler=accounted("demo", 1795893200.0))
    text = report_markdown([record])
    assert "6 jobs, 0.04 node hours, 0.04 GPU hours, 2 kWh." in text
    assert "| 6 | NODE_FAIL | 1 min 34 s | 1 (n2) | cpu 1, gres/gpu 1 | 94 |  |" in text
    document = report_document(record)["scheduler"]
    assert isinstance(document, dict)
    assert (document["node_s"], document["gpu_s"], document["energy_j"]) == (154, 154, 7200000)
    assert document["jobs"][5]["state"] == "NODE_FAIL"


def test_command_asks_for_all_jobs_of_the_run_in_unix_seconds(said: Path) -> None:
    began = datetime.fromtimestamp(1795893200.0 - BEFORE_S).isoformat()  # in local time, as sacct reads it
    write_program(said, 'for word in "$@"; do echo "$word"; done >"$0.words"; echo "$SLURM_TIME_FORMAT" >"$0.format"')
    assert accounted("demo", 1795893200.0).jobs == ()
    words = said.with_name("sacct.words").read_text().split("\n")
    assert {"--duplicates", "--allocations", "--name=holdfast-demo", f"--starttime={began}"} < {*words}
    assert said.with_name("sacct.format").read_text() == "%s\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", "Slurm accounting storage is disabled"),
        ("exec /bin/sleep 60", "no answer within 0.2 s"),
        ("", "sacct is not installed here"),
    ],
    ids=["disabled", "hanging", "missing"],
)
def test_report_says_why_nothing_is_known(script: str, why: str, said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sacct, "TIMEOUT_S", 0.2)
    if script:
        write_program(said, script)
    record = RunRecord(status=RunStatus(run="demo"), scheduler=accounted("demo", 1795893200.0))
    assert why in report_markdown([record])
