"""A target's `pod`: what it adds to the run's pods, what it may not change, and the line that is named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.launch.kubernetes.golden_cases import CASES, MPIRUN, POD, Case, render_context

from holdfast.errors import HoldfastError
from holdfast.findings import Finding, Severity
from holdfast.job.targets import TargetSpec, find_target, located_in_target
from holdfast.launch.kubernetes.manifests.pod_patch import with_patch
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import PART_LABEL
from holdfast.launch.kubernetes.preflight.dry_run_pods import templates
from holdfast.launch.kubernetes.preflight.job_checks import check_job_on_cluster
from holdfast.launch.kubernetes.preflight.pod_checks import TARGET_PREFIX

WORKLOADS = {
    "node": Case(),
    "pytorch": Case(target={"workload": "pytorchjob"}),
    "worker": Case(job=MPIRUN, target={"agent": False}),
}
"""By the name of the ranks' container."""


def found(pod: Mapping[str, Any], case: Case | None = None) -> list[Finding]:
    case = case or Case()
    findings = check_job_on_cluster(render_context(Case(job=case.job, target={**case.target, "pod": pod})))
    return [each for each in findings if each.where.startswith(f"{TARGET_PREFIX}pod")]


def patched(spec: Mapping[str, Any], case: Case | None = None) -> list[Finding]:
    return found({"patch": {"spec": spec}}, case)


def pods(pod: Mapping[str, Any], case: Case | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The pod templates of a run, by their part."""
    case = case or Case()
    for each in render(render_context(Case(job=case.job, target={**case.target, "pod": pod}))).objects:
        for template in templates(each):
            yield template["metadata"]["labels"][PART_LABEL], template


def test_labels_are_on_every_pod_and_the_rest_on_nodes_alone() -> None:
    for part, template in [*pods(POD), *pods({**POD, "env_from": {}}, WORKLOADS["worker"])]:
        assert template["metadata"]["labels"]["team"] == "ml"
        assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
        assert {each["imagePullPolicy"] for each in template["spec"]["containers"]} == {"Always"}
        assert ("runtimeClassName" in template["spec"]) == (part == "node")


@pytest.mark.parametrize("container", WORKLOADS)
def test_one_patch_is_for_the_ranks_container_of_every_workload(container: str) -> None:
    assert found({**POD, "env_from": {}}, WORKLOADS[container]) == []
    (node, *_) = (template for part, template in pods({**POD, "env_from": {}}, WORKLOADS[container]) if part == "node")
    (only,) = node["spec"]["containers"]
    assert (only["name"], only["env"][-1]) == (container, {"name": "SPOOL", "value": "/spool"})


def test_account_gets_no_token_unless_the_patch_asks_for_one() -> None:
    wanted = {"service_account": "trainers"}
    token = {"patch": {"spec": {"automountServiceAccountToken": True}}}
    for more, mounted in (({}, False), (token, True)):
        (node,) = (template["spec"] for part, template in pods({**wanted, **more}) if part == "node")
        assert (node["serviceAccountName"], node["automountServiceAccountToken"]) == ("trainers", mounted)
        assert found({**wanted, **more}) == []


RANKS = "pod.patch.spec.containers[0]"


def of_ranks(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "node", **fields}]}


@pytest.mark.parametrize(
    ("spec", "code", "where", "words"),
    [
        ({"restartPolicy": "Always"}, "pod-patch-refused", "pod.patch.spec.restartPolicy", "operator"),
        ({"subdomain": "x"}, "pod-patch-refused", "pod.patch.spec.subdomain", "find one another"),
        (
            {"terminationGracePeriodSeconds": 1},
            "pod-patch-refused",
            "pod.patch.spec.terminationGracePeriodSeconds",
            "60",
        ),
        ({"nodeSelector": {"a": "b"}}, "pod-patch-refused", "pod.patch.spec.nodeSelector", "holdfast reads it"),
        ({"volumes": None}, "pod-patch-refused", "pod.patch.spec.volumes", "removes nothing"),
        (
            {"volumes": [{"name": "keys", "emptyDir": {}}]},
            "pod-patch-refused",
            "pod.patch.spec.volumes[0]",
            "`keys` in `volumes`",
        ),
        ({"volumes": [{"emptyDir": {}}]}, "pod-patch-refused", "pod.patch.spec.volumes[0]", "needs its `name`"),
        ({"volumes": {}}, "wrong-type", "pod.patch.spec.volumes", "a list"),
        ({"volumess": []}, "unknown-field", "pod.patch.spec.volumess", "volumess"),
        (
            {"securityContext": {"runAsUser": 0}},
            "pod-patch-refused",
            "pod.patch.spec.securityContext.runAsUser",
            "1000",
        ),
        (of_ranks(command=["sh"]), "pod-patch-refused", f"{RANKS}.command", "`command`"),
        (of_ranks(args=["sh"]), "pod-patch-refused", f"{RANKS}.args", "command"),
        (of_ranks(image="x"), "pod-patch-refused", f"{RANKS}.image", "registry.example/train:1"),
        (of_ranks(livenessProbe={}), "pod-patch-refused", f"{RANKS}.livenessProbe", "kills its ranks"),
        (of_ranks(envv=[]), "unknown-field", f"{RANKS}.envv", "envv"),
        (of_ranks(resources={"limits": {"cpu": "1"}}), "pod-patch-refused", f"{RANKS}.resources.limits.cpu", "96"),
        (of_ranks(env=[{"name": "POD_IP", "value": "x"}]), "pod-patch-refused", f"{RANKS}.env[0]", "POD_IP"),
        (of_ranks(env=[{"name": "RANK", "value": "0"}]), "reserved-name", f"{RANKS}.env[0]", "RANK"),
        (
            of_ranks(volumeMounts=[{"name": "x", "mountPath": "/holdfast/x"}]),
            "volume-clash",
            f"{RANKS}.volumeMounts[0].mountPath",
            "/holdfast",
        ),
        (
            of_ranks(volumeMounts=[{"name": "home", "mountPath": "/all"}]),
            "pod-patch-refused",
            f"{RANKS}.volumeMounts[0]",
            "other runs",
        ),
        (
            {"initContainers": [{"name": "s", "image": "s", "volumeMounts": [{"name": "keys", "mountPath": "/k"}]}]},
            "pod-patch-refused",
            "pod.patch.spec.initContainers[0].volumeMounts[0]",
            "tokens",
        ),
        (
            {"initContainers": [{"name": "folders", "image": "s"}]},
            "pod-patch-refused",
            "pod.patch.spec.initContainers[0]",
            "folders",
        ),
    ],
)
def test_patch_that_changes_what_holdfast_renders_is_refused(
    spec: Mapping[str, Any], code: str, where: str, words: str
) -> None:
    (finding,) = patched(spec)
    assert (finding.code, finding.where, finding.severity) == (code, TARGET_PREFIX + where, Severity.ERROR)
    assert words in finding.what
    assert finding.remedy


@pytest.mark.parametrize(
    ("patch", "code"),
    [
        ({"metadata": {"labels": {"holdfast/run": "x"}}}, "reserved-key"),
        ({"metadata": {"labels": {"team": 1}}}, "wrong-type"),
        ({"metadata": {"name": "x"}}, "unknown-field"),
        ({"metadata": []}, "wrong-type"),
        ({"spec": []}, "wrong-type"),
        ({"kind": "Pod"}, "unknown-field"),
    ],
)
def test_patch_of_something_else_than_a_pod_template_is_refused(patch: Mapping[str, Any], code: str) -> None:
    assert [finding.code for finding in found({"patch": patch})] == [code]


@pytest.mark.parametrize(
    ("spec", "code", "severity"),
    [
        ({"hostIPC": True}, "pod-patch-loosens-security", Severity.WARNING),
        (of_ranks(securityContext={"privileged": True}), "pod-patch-loosens-security", Severity.WARNING),
        (
            of_ranks(securityContext={"capabilities": {"add": ["SYS_PTRACE"]}}),
            "pod-patch-loosens-security",
            Severity.WARNING,
        ),
        (of_ranks(securityContext={"capabilities": {"drop": []}}), "pod-patch-refused", Severity.ERROR),
        ({"containers": [{"name": "proxy", "image": "p"}]}, "sidecar-keeps-pod", Severity.WARNING),
    ],
)
def test_patch_that_loosens_or_holds_a_pod_is_warned_of(spec: Mapping[str, Any], code: str, severity: Severity) -> None:
    assert [(finding.code, finding.severity) for finding in patched(spec)] == [(code, severity)]


def test_patch_leaves_pods_of_a_run_apart_on_the_host_network() -> None:
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    assert patched({"affinity": affinity}) == []
    (finding,) = patched({"affinity": affinity}, CASES["jobset-oke-roce"])
    assert finding.code == "pod-patch-refused"


@pytest.mark.parametrize(
    ("pod", "code", "where"),
    [
        ({"labels": {"kueue.x-k8s.io/queue-name": "q"}}, "reserved-key", "labels.kueue.x-k8s.io/queue-name"),
        ({"annotations": {"holdfast/x": "y"}}, "reserved-key", "annotations.holdfast/x"),
        ({"volumes": [{"name": "shm", "mount": "/x", "claim": "c"}]}, "volume-clash", "volumes[0].name"),
        ({"volumes": [{"name": "x", "mount": "/run", "claim": "c"}]}, "volume-clash", "volumes[0].mount"),
        ({"volumes": [{"name": "x", "mount": "/x", "claim": "checkpoints"}]}, "volume-clash", "volumes[0].claim"),
    ],
)
def test_addition_that_clashes_with_holdfast_is_refused(pod: Mapping[str, Any], code: str, where: str) -> None:
    (finding,) = found(pod)
    assert (finding.code, finding.where) == (code, f"{TARGET_PREFIX}pod.{where}")


def test_ranks_under_sshd_would_not_see_the_variables_of_their_container() -> None:
    (finding,) = found({"env_from": {"secrets": ["s"]}}, WORKLOADS["worker"])
    assert (finding.code, finding.where) == ("not-supported", "target.pod.env_from")


def test_multus_annotation_belongs_to_the_fabric_that_renders_it() -> None:
    networks = {"annotations": {"k8s.v1.cni.cncf.io/networks": "team/net"}}
    assert found(networks) == []
    assert [finding.code for finding in found(networks, CASES["jobset-sriov"])] == ["reserved-key"]


def test_target_shown_in_the_page_is_accepted() -> None:
    page = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(kind: kubernetes\nnamespace: ml\npod:\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found(TargetSpec.model_validate(yaml.safe_load(shown)).pod.model_dump(exclude_defaults=True)) == []


TARGET = """\
kind: kubernetes
pod:
  patch:
    spec:
      containers:
      - name: node
        env:
        - {name: GOOD, value: x}
        - {name: POD_IP, value: x}
"""


def write(folder: Path, text: str) -> None:
    (folder / ".holdfast" / "targets").mkdir(parents=True)
    (folder / ".holdfast" / "targets" / "cluster.yaml").write_text(text)


def test_finding_names_the_file_and_the_line_of_the_patch(tmp_path: Path) -> None:
    write(tmp_path, TARGET)
    spec = find_target("cluster", start=tmp_path, environ={})
    (finding,) = found(spec.pod.model_dump(exclude_defaults=True))
    of_field = Finding(code="", what="", where=finding.where.removeprefix(TARGET_PREFIX))
    located = located_in_target(of_field, "cluster", start=tmp_path, environ={})
    assert located.where.endswith("cluster.yaml:9")
    assert located.evidence == ("- {name: POD_IP, value: x}",)


@pytest.mark.parametrize(
    ("text", "code", "remedy"),
    [
        ("labels: {a: b}", "unknown-field", "`pod.labels`"),
        ("serviceAccountName: x", "unknown-field", "`pod.service_account`"),
        ("pod: {runtimeClassName: x}", "unknown-field", "`pod.runtime_class`"),
        ("affinity: {}", "unknown-field", "`pod.patch.spec.affinity`"),
        ("runtime_class: x", "unknown-field", "`pod.runtime_class`"),
        ("pod: {volumes: [{name: x, mount: /x, clam: y}]}", "unknown-field", "`claim`"),
        ("pod: {volumes: [{name: x, mount: /x, claim: y, sub: z}]}", "unknown-field", "mount"),
        ("pod: {volumes: [{name: x, mount: /x, claim: y, secret: z}]}", "bad-volume", "one of them"),
        ("pod: {volumes: [{name: x, mount: x, claim: y}]}", "bad-path", ""),
        ("pod: {volumes: [{name: x.y, mount: /x, claim: y}]}", "bad-name", ""),
        ("pod: {annotations: {a: true}}", "wrong-type", "quotes"),
        ("pod: {labels: {a: b c}}", "bad-name", ""),
        ("pod: {pull_policy: always}", "bad-value", "Always"),
        ("pod: {env_from: [x]}", "wrong-type", ""),
        ("ttl_s: 1", "out-of-range", ""),
        ("egress: [{cidr: 10.0.0.1/8}]", "bad-egress", "10.20.0.0/16"),
        ("egress: [{cidr: 10.0.0.0/8, namespace: storage}]", "bad-egress", "10.20.0.0/16"),
        ("egress: [{}]", "bad-egress", "ports"),
        ("egress: [{ports: [0]}]", "out-of-range", ""),
    ],
)
def test_wrong_field_is_reported_with_the_right_one(tmp_path: Path, text: str, code: str, remedy: str) -> None:
    write(tmp_path, text)
    with pytest.raises(HoldfastError) as raised:
        find_target("cluster", start=tmp_path, environ={})
    finding = raised.value.findings[0]
    assert finding.code == code
    assert remedy in finding.remedy


names = st.sampled_from(["name", "containers", "volumes", "env", "spec", "metadata", "labels", "node", "mountPath"])
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["node", "keys", "/holdfast", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(names, trees, max_size=3))
def test_any_patch_gives_findings_or_a_template_and_never_an_error(patch: dict[str, Any]) -> None:
    findings = found({"patch": patch})
    if not any(finding.severity is Severity.ERROR for finding in findings):
        merged = list(pods({"patch": patch}))
        assert yaml.safe_load(yaml.safe_dump(merged))


def test_patch_keeps_the_reason_of_a_group_and_drops_that_of_a_value_it_replaces() -> None:
    template: YamlValue = {"spec": {"a": Commented(1, "old"), "b": Commented({"c": 2}, "kept"), "d": None}}
    patch = {"spec": {"a": 3, "b": {"e": 4}, "d": {"f": 5}}}
    assert with_patch(template, patch, "node") == {
        "spec": {"a": 3, "b": Commented({"c": 2, "e": 4}, "kept"), "d": {"f": 5}}
    }
