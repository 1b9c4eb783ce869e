"""The command under Nsight Systems names a report for each process that nsys follows."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from holdfast import api
from holdfast.cli import main
from holdfast.errors import ExitCode, HoldfastError
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job, Launch
from holdfast.launch.nsys import nsys_command
from holdfast.run_dir import RunDir


def job(*command: str, **fields: object) -> Job:
    return api.load_job(None, command=command).model_copy(update=fields)


def test_each_rank_has_its_report_and_the_command_follows_unchanged() -> None:
    made = nsys_command(job("python", "train.py", "--lr", "1"), "/shared")
    assert made.argv[:2] == ("nsys", "profile")
    assert "--kill=none" in made.argv
    assert made.argv[-5:] == (f"--output={made.output}", "python", "train.py", "--lr", "1")
    assert made.output == "/shared/attempt-%q{HOLDFAST_ATTEMPT}-rank-%q{RANK}"


def test_launcher_has_a_report_for_each_node() -> None:
    made = nsys_command(job("torchrun", "train.py", launch=Launch.PER_NODE), "/shared")
    assert made.output.endswith("-node-%q{GROUP_RANK}")


@pytest.mark.parametrize("launch", [Launch.ACCELERATE, Launch.DEEPSPEED, Launch.MPI])
def test_launcher_whose_options_holdfast_adds_is_refused(launch: Launch) -> None:
    with pytest.raises(HoldfastError, match="cannot follow"):
        nsys_command(job("mpirun", "python", "train.py", launch=launch), "/shared")


def test_printed_command_is_a_jobs_command_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    made = RunDir.create("demo")
    spec = RunSpec(job=job("python", "a b.py"), fabric="tcp", created_at=0.0, base="/home/me")
    made.job.write_text(spec.model_dump_json())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["profile", "--nsys"]) == ExitCode.CANNOT_RUN_HERE
    assert "[nsys-missing]" in capsys.readouterr().err
    program = tmp_path / "nsys"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert main(["profile", "--nsys"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[0])
    assert words[:3] == ["holdfast", "run", "--set"]
    again = api.load_job(None, command=("true",), overrides=[words[3]])
    assert again.command == nsys_command(spec.job, "/home/me").argv
