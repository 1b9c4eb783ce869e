"""`holdfast render --on` a cluster's target: what is printed, what is refused, what is not loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.cli.conftest import Cli

from holdfast.errors import ExitCode

JOB = """\
name: quick
image: registry.example/train:1
command: python train.py
nodes: 2
secrets:
  HF_TOKEN: {env: HF_TOKEN}
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job and the target `cluster`."""
    folder = tmp_path / "project"
    (folder / ".holdfast" / "targets").mkdir(parents=True)
    (folder / ".holdfast" / "targets" / "cluster.yaml").write_text("kind: kubernetes\nqueue: train\n")
    (folder / "job.yaml").write_text(JOB)
    (folder / "train.py").write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_show")
    return folder


def test_the_same_text_each_time_and_the_objects_as_json(cli: Cli, cluster: Path) -> None:
    first, second = cli("render", "--on", "cluster"), cli("render", "--on", "cluster")
    assert first.code == ExitCode.OK
    assert first.out == second.out
    assert "hf_do_not_show" not in first.out + first.err
    objects = cli("render", "--on", "cluster", "-o", "json").data["objects"]
    assert list(yaml.safe_load_all(first.out)) == objects
    assert [each["kind"] for each in objects[:2]] == ["ConfigMap", "JobSet"]


def test_demo_lists_what_it_does_not_guarantee(cli: Cli, cluster: Path) -> None:
    told = cli("render", "--on", "cluster").err
    assert "[demo-template]" in told
    assert "checkpoints are lost with their pod" in told


def test_problem_is_reported_with_its_line(cli: Cli, cluster: Path) -> None:
    (cluster / "job.yaml").write_text(JOB.replace("image: registry.example/train:1\n", "checkpoint: /home/me\n"))
    answer = cli("render", "--on", "cluster")
    assert answer.code == ExitCode.CANNOT_RUN_HERE
    assert "[no-image]" in answer.err
    assert "[path-not-shared]" in answer.err
    assert "job.yaml:2" in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(("device", "line"), [("", ""), ("fabric_device: {per_node: 8}\n", ":4")])
def test_missing_target_field_is_reported_with_its_file(cli: Cli, cluster: Path, device: str, line: str) -> None:
    path = cluster / ".holdfast" / "targets" / "cluster.yaml"
    path.write_text(f"{path.read_text()}fabric: sriov\n{device}")
    answer = cli("render", "--on", "cluster", "-o", "json")
    assert answer.code == ExitCode.CANNOT_RUN_HERE
    where = {one["where"] for one in json.loads(answer.err)["findings"] if one["code"] == "fabric-device-unnamed"}
    assert where == {f"{path}{line}"}


def test_neither_torch_nor_a_client_is_loaded(cluster: Path) -> None:
    program = (
        "import sys; from holdfast.cli import main; main(['render', '--on', 'cluster']);"
        "sys.exit(sorted({'torch', 'kr8s', 'kubernetes', 'httpx'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kind: JobSet" in done.stdout
