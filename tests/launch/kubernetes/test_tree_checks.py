"""What a tree of manifests cannot have in it, and what its user is told of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace
from tests.launch.kubernetes.golden_cases import CASES, tree_context

from holdfast import api
from holdfast.errors import HoldfastError
from holdfast.launch.kubernetes.object_names import ObjectNames
from holdfast.launch.kubernetes.preflight.tree_checks import check_tree
from holdfast.launch.kubernetes.tree_job import MAX_COMPRESSED_CODE_BYTES

TARGET = "kind: kubernetes\nnamespace: ml\n"


def codes(name: str, run: str = "llama-v1", packed: bytes = b"", **place: object) -> list[str]:
    case = CASES[name]
    ctx = replace(tree_context(replace(case, target={**case.target, **place})), names=ObjectNames(run))
    return [finding.code for finding in check_tree(ctx, packed)]


def test_what_is_not_in_a_tree_is_named_and_what_cannot_be_in_it_is_refused() -> None:
    assert codes("jobset-tcp-bare") == []
    assert codes("jobset-tcp") == ["not-in-tree"], "the job's secrets"
    assert codes("jobset-oke-roce") == ["not-in-tree"] * 2, "the claim too, which the target would have created"
    assert codes("jobset-tcp-bare", queue="default") == ["controller-held-by-queue"]
    for wrong in ("Llama", "llama-", "1", "x" * 41, "a.b", ""):
        assert codes("jobset-tcp-bare", run=wrong) == ["bad-run-id"], wrong
    assert codes("jobset-tcp-bare", packed=bytes(MAX_COMPRESSED_CODE_BYTES)) == []
    assert codes("jobset-tcp-bare", packed=bytes(MAX_COMPRESSED_CODE_BYTES + 1)) == ["code-too-large-for-tree"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    targets = tmp_path / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "lab.yaml").write_text(TARGET)
    return tmp_path


def render(project: Path, *overrides: str, target: str = "lab") -> list[dict[str, object]]:
    job = api.load(None, command=("python", "train.py"), overrides=("image=any", *overrides))
    text = api.render(job, target, base=project, tree="llama-v1").text
    return list(yaml.safe_load_all(text))


def kinds(objects: Sequence[dict[str, object]]) -> list[object]:
    return [each["kind"] for each in objects]


def test_code_is_in_the_tree_unless_the_job_runs_in_a_folder_of_the_image(project: Path) -> None:
    (project / "train.py").write_text("print(1)")
    (project / "table.bin").write_bytes(os.urandom(MAX_COMPRESSED_CODE_BYTES))
    with pytest.raises(HoldfastError) as refused:
        render(project)
    assert [each.code for each in refused.value.findings if each.severity == "error"] == ["code-too-large-for-tree"]
    in_image = render(project, "workdir=/app")
    (project / "table.bin").unlink()
    shipped = render(project)
    assert shipped == render(project), "a tree is the same each time"
    assert kinds(shipped).count("ConfigMap") == kinds(in_image).count("ConfigMap") + 1


def test_no_tree_is_rendered_for_this_machine(project: Path) -> None:
    with pytest.raises(HoldfastError) as refused:
        render(project, target="local")
    assert refused.value.findings[0].code == "not-supported"
