"""A target that extends a template: what is merged, where errors stand, and which copies are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Finding
from holdfast.job.target_templates import copy_text, template_use
from holdfast.job.targets import TargetSpec, find_target, located_in_target, read_target

TEMPLATE = """\
kind: kubernetes
queue: train
volume:
  claim: shared
  folders: [datasets, models]
tolerations: [{key: nvidia.com/gpu}]
pod:
  labels: {team: platform, cost-center: "7"}
topology_levels: {rack: example.com/rack}
"""
TARGET = """\
extends: ../base.yaml
namespace: vision
queue:
volume: {folders: [images]}
tolerations: [{key: gpu}, {key: spot}]
pod:
  labels: {team: vision}
"""
PUBLISHED = "configmap://ml-platform/gpu:3"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The target file `t` of a project, with TEMPLATE as base.yaml."""
    folder = tmp_path / ".holdfast" / "targets"
    folder.mkdir(parents=True)
    (folder.parent / "base.yaml").write_text(TEMPLATE)
    (folder / "t.yaml").write_text(TARGET)
    return folder / "t.yaml"


def store(target: Path, text: str, published: str = PUBLISHED) -> Path:
    """Have the target extend a published template, with this text as its stored copy."""
    target.write_text(f"extends: {published}\nnamespace: vision\n")
    use = template_use(target)
    assert use is not None
    use.copy.parent.mkdir(parents=True, exist_ok=True)
    use.copy.write_text(copy_text(use.source, text))
    return use.copy


def refused(target: Path, exit_code: ExitCode = ExitCode.INVALID_JOB) -> Finding:
    with pytest.raises(HoldfastError) as raised:
        read_target(target, fabrics=("tcp",))
    assert raised.value.exit_code is exit_code
    (finding,) = raised.value.findings
    assert finding.remedy
    return finding


def test_mappings_are_merged_and_lists_and_scalars_replaced(target: Path) -> None:
    expected = {
        "extends": "../base.yaml",
        "kind": "kubernetes",
        "namespace": "vision",
        "queue": None,
        "volume": {"claim": "shared", "folders": ["images"]},
        "tolerations": [{"key": "gpu"}, {"key": "spot"}],
        "pod": {"labels": {"team": "vision", "cost-center": "7"}},
        "topology_levels": {"rack": "example.com/rack"},
    }
    assert read_target(target) == TargetSpec.model_validate(expected)


@pytest.mark.parametrize(
    ("in_template", "in_target", "code", "where"),
    [
        ("kind: kubernetes\nqeue: train", "namespace: a", "unknown-field", "base.yaml:2"),
        ("kind: kubernetes\nqueue: train", "qeue: a", "unknown-field", "t.yaml:2"),
        ("volume:\n  claim: UPPER", "volume: {folders: [a]}", "bad-name", "base.yaml:2"),
        ("volume:\n  claim: fine", "volume: {claim: UPPER}", "bad-name", "t.yaml:2"),
        ("namespace: a\nvolume: {size: 1TiB}", "volume:\n  folders: [a]", "missing-field", "t.yaml:2"),
        ("tolerations:\n- key: fine\n- key: b@d", "namespace: a", "bad-name", "base.yaml:3"),
        ("tolerations:\n- key: fine\n- key: b@d", "tolerations:\n- key: wor$e", "bad-name", "t.yaml:3"),
        ("namespace: a\nfabric: tpc", "namespace: a", "unknown-fabric", "base.yaml:2"),
        ("[", "namespace: a", "bad-yaml", "base.yaml:1"),
        ("[a]", "namespace: a", "wrong-type", "base.yaml"),
        ("kind: kubernetes\nextends: more.yaml", "namespace: a", "template-nested", "base.yaml:2"),
    ],
)
def test_error_has_the_line_of_the_file_that_it_is_in(
    target: Path, in_template: str, in_target: str, code: str, where: str
) -> None:
    (target.parent.parent / "base.yaml").write_text(in_template)
    target.write_text(f"extends: ../base.yaml\n{in_target}\n")
    with pytest.raises(HoldfastError) as raised:
        read_target(target, fabrics=("tcp",))
    found = {finding.code: finding for finding in raised.value.findings}
    assert found[code].where.endswith(f"/{where}")


@pytest.mark.parametrize(
    ("field", "where"),
    [
        ("volume.claim", "base.yaml:4"),
        ("volume.folders", "t.yaml:4"),
        ("tolerations[1].key", "t.yaml:5"),
        ("topology_levels", "base.yaml:9"),
        ("pod.labels.cost-center", "base.yaml:8"),
        ("gpu_resource", "t.yaml"),
    ],
)
def test_finding_about_a_field_has_the_line_where_the_field_stands(target: Path, field: str, where: str) -> None:
    finding = Finding(code="claim-missing", what="it is not there", where=field)
    located = located_in_target(finding, "t", start=target.parents[2], environ={})
    assert located.where.endswith(f"/{where}")


def test_stored_copy_of_a_published_template_is_read_without_a_cluster(target: Path) -> None:
    copy = store(target, TEMPLATE)
    assert copy == target.parent / "templates" / "ml-platform" / "gpu" / "3.yaml"
    spec = find_target("t", start=target.parents[2], environ={})
    assert (spec.namespace, spec.queue, spec.extends) == ("vision", "train", PUBLISHED)
    copy.write_bytes(copy.read_bytes().replace(b"\n", b"\r\n"))  # as git may check it out
    assert read_target(target) == spec


def test_context_of_a_published_template_is_refused(target: Path) -> None:
    copy = store(target, f"{TEMPLATE}context: mine\n")
    finding = refused(target)
    assert (finding.code, finding.where) == ("template-names-context", f"{copy}:12")


def test_template_that_was_not_fetched_names_the_command(target: Path) -> None:
    store(target, TEMPLATE).unlink()
    finding = refused(target, ExitCode.NOT_FOUND)
    assert finding.code == "template-not-fetched"
    assert finding.where.endswith("t.yaml:1")
    assert "`holdfast target fetch t`" in finding.remedy


@pytest.mark.parametrize(
    ("before", "after"), [("queue: train", "queue: mine"), ("gpu:3", "gpu:2"), ("# sha256:", "# sha255:")]
)
def test_edited_copy_is_refused(target: Path, before: str, after: str) -> None:
    copy = store(target, TEMPLATE)
    copy.write_text(copy.read_text().replace(before, after))
    finding = refused(target)
    assert (finding.code, finding.where) == ("template-edited", str(copy))


@pytest.mark.parametrize(
    ("extends", "code"),
    [
        ("gone.yaml", "template-missing"),
        (f"{'long' * 64}.yaml", "template-missing"),
        ("oci://registry.example/targets:3", "unknown-template-source"),
        ("configmap://ml/gpu", "unknown-template-source"),
        ("configmap://ml/../../x:3", "unknown-template-source"),
        ("configmap://ml/gpu:..", "unknown-template-source"),
        ("[a]", "wrong-type"),
    ],
)
def test_source_that_is_not_there_or_not_known(target: Path, extends: str, code: str) -> None:
    target.write_text(f"kind: kubernetes\nextends: {extends}\n")
    finding = refused(target, ExitCode.NOT_FOUND if code == "template-missing" else ExitCode.INVALID_JOB)
    assert finding.code == code
    assert finding.where.endswith("t.yaml:2")
