"""Launchers inside shell scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.findings import Severity
from holdfast.job.spec import Job
from holdfast.launch.shell_script import launcher_in_script


def found(base: Path, **fields: object) -> list[tuple[str, tuple[str, ...]]]:
    findings = list(launcher_in_script(Job.model_validate({"nodes": 2, **fields}), base))
    assert all((one.code, one.severity) == ("launcher-per-rank", Severity.ERROR) for one in findings)
    return [(one.where, one.evidence) for one in findings]


def test_launcher_in_a_script_is_named_with_its_line(tmp_path: Path) -> None:
    line = "OMP_NUM_THREADS=1 exec torchrun --nproc_per_node 2"
    (tmp_path / "go.sh").write_text(f"#!/bin/bash\nset -e\n# torchrun is next\n{line} \\\n  train.py\n")
    (tmp_path / "go.sh").chmod(0o755)
    for command in (["bash", "-e", "go.sh"], ["./go.sh"]):
        ((where, (evidence,)),) = found(tmp_path, command=command)
        assert where.removeprefix("./") == "go.sh:4"
        assert evidence.startswith(line)
    assert found(tmp_path, command=["sh", "-ec", "accelerate launch a.py"]) == [
        ("command:1", ("accelerate launch a.py",))
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"command": ["bash", "go.sh"], "launch": "per-node"},
        {"command": ["bash", "go.sh"], "nodes": 1},
        {"command": ["bash", "plain.sh"]},
        {"command": ["bash", "gone.sh"]},
        {"command": ["bash", "."]},
        {"command": ["bash"]},
        {"command": ["python", "go.sh"]},
    ],
)
def test_what_starts_no_launcher_for_every_rank_passes(tmp_path: Path, fields: dict[str, object]) -> None:
    (tmp_path / "go.sh").write_text("torchrun train.py\n")
    (tmp_path / "plain.sh").write_text("echo 'torchrun\npython torchrun.py # torchrun x\n\"\n")
    assert found(tmp_path, **fields) == []
