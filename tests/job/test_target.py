"""Where a target is found, and what is said when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Finding
from holdfast.job.isolation import Isolation
from holdfast.job.target_files import known_targets
from holdfast.job.targets import TargetSpec, find_target


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)


def refused(name: str, start: Path, exit_code: ExitCode = ExitCode.INVALID_JOB) -> Finding:
    with pytest.raises(HoldfastError) as raised:
        find_target(
            name,
            start=start,
            environ={"XDG_CONFIG_HOME": str(start / "config")},
            fabrics=("auto", "tcp"),
            kinds=("local", "kubernetes"),
        )
    assert raised.value.exit_code is exit_code
    return raised.value.findings[0]


def test_local_built_in_with_process_isolation(tmp_path: Path) -> None:
    target = find_target("local", start=tmp_path, environ={"HOME": str(tmp_path)})
    assert target == TargetSpec()
    assert (target.kind, target.isolation) == ("local", Isolation.PROCESS)


def test_project_wins_over_user_and_nearest_wins(tmp_path: Path) -> None:
    near = tmp_path / "project" / "deep"
    near.mkdir(parents=True)
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    write(tmp_path / "config" / "holdfast" / "targets", "net", "kind: local\nfabric: roce")
    assert find_target("net", start=near, environ=environ).fabric == "roce"
    write(tmp_path / "project" / ".holdfast" / "targets", "net", "kind: local\nisolation: netns")
    assert find_target("net", start=near, environ=environ).isolation is Isolation.NETNS
    write(near / ".holdfast" / "targets", "local", "checkpoint_root: /data")
    assert find_target("local", start=near, environ=environ).checkpoint_root == "/data"
    assert known_targets(near, environ) == ("local", "net")


def test_user_folder_without_xdg_is_under_home(tmp_path: Path) -> None:
    write(tmp_path / ".config" / "holdfast" / "targets", "mine", "fabric: tcp")
    assert find_target("mine", start=Path("/"), environ={"HOME": str(tmp_path)}).fabric == "tcp"


@pytest.mark.parametrize("name", ["locla", "../etc/passwd", "", "a\0b", "x" * 1000])
def test_unknown_target_lists_known_ones(tmp_path: Path, name: str) -> None:
    finding = refused(name, tmp_path, ExitCode.NOT_FOUND)
    assert finding.code == "unknown-target"
    assert finding.evidence == ("known targets: local",)
    assert finding.remedy


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("isolation: netsn", "bad-value", ":1"),
        ("kind: local\nisolaton: netns", "unknown-field", ":2"),
        ("kind: local\ntopology: nodes.json", "unknown-field", ":2"),
        ("kind: local\nhosts: [a]", "unknown-field", ":2"),
        ("kind: local\nslurm: {partition: long}", "unknown-field", ":2"),
        ("kind: slurm", "unknown-target-kind", ":1"),
        ("kind: kubernets", "unknown-target-kind", ":1"),
        ("backend: local", "unknown-field", ":1"),
        ("kind: kubernetes\nnamespace: My Space", "bad-name", ":2"),
        ("volume: {claim: Ckpt}", "bad-name", ":1"),
        ("fabric: tpc", "unknown-fabric", ":1"),
        ("[", "bad-yaml", ":1"),
    ],
)
def test_wrong_target_is_reported_with_its_line(tmp_path: Path, text: str, code: str, where: str) -> None:
    write(tmp_path / ".holdfast" / "targets", "p", text)
    finding = refused("p", tmp_path)
    assert finding.code == code
    assert finding.where.endswith(f"p.yaml{where}")
    assert finding.remedy or code in {"bad-yaml", "bad-name"}
