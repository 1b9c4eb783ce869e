"""A template that a target extends, fetched from a ConfigMap and stored once the target is valid with it."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast import api
from holdfast.errors import HoldfastError
from holdfast.job.loader import MAX_BYTES
from holdfast.launch.kubernetes import published_template

SOURCE = "configmap://ml-platform/gpu:3"
COPY = Path(".holdfast", "targets", "templates", "ml-platform", "gpu", "3.yaml")


class FakeCluster:
    """An API server with one ConfigMap."""

    def __init__(self, **data: str) -> None:
        self.data = data

    def __call__(self, **_: object) -> FakeCluster:
        return self

    async def get(self, _: str) -> Mapping[str, Any]:
        return {"data": self.data}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose target `vision` extends SOURCE."""
    folder = tmp_path / ".holdfast" / "targets"
    folder.mkdir(parents=True)
    (folder / "vision.yaml").write_text(f"extends: {SOURCE}\nnamespace: vision\n")
    return tmp_path


def publish(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_template, "ClusterClient", FakeCluster(**{"3.yaml": text}))


def test_stored_copy_can_be_committed_and_is_what_runs_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish("\ufeffkind: kubernetes\nqueue: train\n", monkeypatch)  # as some editors save it
    fetched = api.fetch_template("vision", base=project)
    assert (fetched.file, fetched.was_stored) == (project / COPY, False)
    beside = project / "beside"
    beside.touch()
    assert stat.S_IMODE(fetched.file.stat().st_mode) == stat.S_IMODE(beside.stat().st_mode)
    assert api.fetch_template("vision", base=project).was_stored


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("kind: kubernetes\nqeue: train\n", "unknown-field", f"{SOURCE}:2"),
        ("kind: kubernetes\nfabric: tpc\n", "unknown-fabric", f"{SOURCE}:2"),
        ("kind: kubernetes\nextends: more.yaml\n", "template-nested", f"{SOURCE}:2"),
        ("context: mine\nkind: kubernetes\n", "template-names-context", f"{SOURCE}:1"),
        ("[", "bad-yaml", f"{SOURCE}:1"),
        ("#" * MAX_BYTES, "file-too-large", SOURCE),
    ],
)
def test_refused_template_leaves_no_file(
    project: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: str, where: str
) -> None:
    publish(text, monkeypatch)
    with pytest.raises(HoldfastError) as refused:
        api.fetch_template("vision", base=project)
    assert (code, where) in [(finding.code, finding.where) for finding in refused.value.findings]
    assert not (project / ".holdfast" / "targets" / "templates").exists()
