"""What `check --on` finds on the lab: a place that has all, places that lack something, users who may do little."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.launch.kubernetes.golden_cases import Case, render_context
from tests.launch.kubernetes.test_pending_rules import ELSEWHERE, QUEUE, WEBHOOK, all_in_queues, other_kueue

from holdfast.errors import HoldfastError
from holdfast.findings import Finding, Severity
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.preflight.cluster_checks import check_cluster
from holdfast.launch.kubernetes.preflight.collect_inventory import collect_inventory
from holdfast.launch.kubernetes.preflight.run_permissions import required_permissions
from lab import Lab

pytestmark = pytest.mark.slow

WITHIN_S = 60.0
SMALL: Mapping[str, Any] = {"resources": {}, "gpus_per_node": 0}
CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: checkpoints, namespace: NAME}
spec: {accessModes: [MODE], storageClassName: lab, resources: {requests: {storage: 1Gi}}}
"""
OPERATOR = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: jobset-controller-manager, namespace: NAME}
spec:
  selector: {matchLabels: {a: b}}
  template: {metadata: {labels: {a: b}}, spec: {containers: [{name: a, image: missing.example/operator}]}}
"""
DOWN = WEBHOOK.replace("WHO", "gone").replace("WHERE", '{url: "https://127.0.0.1:9/gone"}').replace("pods", "services")

CLASS = """
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: NAME}
provisioner: BY
"""
MADE = {"claim": "made", "size": "1GiB"}

PLACES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "": (QUEUE.replace("QUOTA", "8") + "---" + CLAIM.replace("MODE", "ReadWriteMany"), {}),
    "queue-missing": ("", {"queue": "train"}),
    "queue-closed": (QUEUE.replace("QUOTA", "8").replace("STOP", "Hold"), {"queue": "train"}),
    "quota-too-small": (QUEUE.replace("QUOTA", "8"), {"queue": "train"}),
    "claim-missing": ("", {"volume": {"claim": "checkpoints"}}),
    "claim-not-shared": (CLAIM.replace("MODE", "ReadWriteOnce"), {"volume": {"claim": "checkpoints"}}),
    "storage-class-missing": ("", {"volume": {"claim": "made", "size": "1GiB", "storage_class": "none"}}),
    "storage-not-shared": (CLASS.replace("BY", "rancher.io/local-path"), {"volume": {**MADE, "storage_class": "NAME"}}),
    "storage-driver-missing": (CLASS.replace("BY", "efs.csi.aws.com"), {"volume": {**MADE, "storage_class": "NAME"}}),
    "volume-elsewhere": (ELSEWHERE, {"volume": {"claim": "checkpoints"}}),
    "referenced-object-missing": ("", {"image_pull_secrets": ["registry"], "priority_class": "none"}),
    "no-machines": ("", {"node_selector": {"for": "nobody"}}),
    "device-missing": ("", {"gpu_resource": "amd.com/gpu"}),
    "webhook-down": (DOWN, {}),
    "operator-down": (OPERATOR, {}),
    "namespace-terminating": ("", {}),
}
"""By the code of what a place lacks, or none where it lacks nothing: what is there, and the target."""


@pytest.fixture
def place(lab: Lab, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Mapping[str, Any]]:
    """Makes a place in the test's namespace, and gives its target."""
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))

    def make(lacking: str) -> Mapping[str, Any]:
        there, target = PLACES[lacking]
        document = there.replace("NAME", namespace).replace("STOP", "None").replace("ORDER", "BestEffortFIFO")
        if document:
            lab.kubectl("create", "-f", "-", input=document)
        plain = {} if lacking == "" else {"queue": None, "volume": None}
        return {**plain, **json.loads(json.dumps(target).replace("NAME", namespace)), "namespace": namespace}

    return make


def found(place: Mapping[str, Any], job: Mapping[str, Any] = SMALL) -> dict[str, Finding]:
    asked = render_context(Case(job={**job, "secrets": {}}, target=place))
    return {
        each.code: each for each in check_cluster(asked, collect_inventory(asked)) if each.severity is Severity.ERROR
    }


def until(place: Mapping[str, Any], codes: set[str], job: Mapping[str, Any] = SMALL) -> dict[str, Finding]:
    """What is found, once these are: controllers take a moment to say how things are."""
    deadline = time.monotonic() + WITHIN_S
    while set(findings := found(place, job)) != codes and time.monotonic() < deadline:
        time.sleep(0.2)
    assert set(findings) == codes
    return findings


@pytest.mark.parametrize("lacking", PLACES)
def test_what_a_place_lacks_is_found(lab: Lab, namespace: str, place, lacking: str) -> None:
    there = place(lacking)
    gpus = {"device-missing": 1, "quota-too-small": 8}.get(lacking)
    job = {"gpus_per_node": gpus, "resources": {}} if gpus else SMALL
    try:
        if lacking == "namespace-terminating":
            kept = {"name": "kept", "namespace": namespace, "finalizers": ["holdfast.test/keep"]}
            document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": kept}
            lab.kubectl("create", "-f", "-", input=json.dumps(document))
            lab.kubectl("delete", "namespace", namespace, "--wait=false")
        findings = until(there, {lacking} - {""}, job)
        assert all(each.remedy for each in findings.values())
    finally:
        if lacking == "namespace-terminating":
            lab.kubectl("patch", "configmap", "kept", "-n", namespace, "-p", '{"metadata":{"finalizers":null}}')
        lab.kubectl("delete", "deployment", "--all", "-n", namespace)
        made = ("validatingwebhookconfiguration", "clusterqueue", "resourceflavor", "storageclass", "persistentvolume")
        for kind in made:
            lab.kubectl("delete", kind, namespace, "--ignore-not-found", "--wait=false")


def test_objects_that_the_targets_pod_names_are_looked_for_one_by_one(lab: Lab, namespace: str, place) -> None:
    pod = {
        "env_from": {"config_maps": ["settings"], "secrets": ["tokens"]},
        "volumes": [
            {"name": "data", "mount": "/data", "claim": "dataset"},
            {"name": "keys", "mount": "/keys", "secret": "keys"},
            {"name": "etc", "mount": "/etc/more", "config_map": "settings"},
            {"name": "scratch", "mount": "/scratch", "host_path": "/mnt"},
        ],
        "resource_claims": [{"name": "gpus", "template": "eight-gpus"}],
    }
    asked = render_context(Case(job={**SMALL, "secrets": {}}, target={**place("no-machines"), "pod": pod}))
    wanted = ["settings", "tokens", "dataset", "keys", "settings", "eight-gpus"]
    assert [each.name for each in collect_inventory(asked).missing_references] == wanted
    lab.kubectl("create", "configmap", "settings", "-n", namespace)
    lab.kubectl("create", "secret", "generic", "keys", "-n", namespace)
    missing = collect_inventory(asked).missing_references
    assert [(each.kind, each.where) for each in missing] == [
        ("Secret", "pod.env_from.secrets"),
        ("PersistentVolumeClaim", "pod.volumes.0.claim"),
        ("ResourceClaimTemplate", "pod.resource_claims.0.template"),
    ]


def test_registries_of_pull_secrets_are_read(lab: Lab, namespace: str, place) -> None:
    access = ("--docker-username=eve", "--docker-password=password", "--docker-server=other.example")
    lab.kubectl("create", "secret", "docker-registry", "other", *access, "-n", namespace)
    lab.kubectl("create", "secret", "generic", "keys", "-n", namespace)
    target = {**place("no-machines"), "image_pull_secrets": ["other", "keys", "absent"]}
    asked = render_context(Case(job={**SMALL, "secrets": {}}, target=target))
    inventory = collect_inventory(asked)
    assert inventory.pull_secrets == {"other": ("other.example",), "keys": None}
    unused = [each.what for each in check_cluster(asked, inventory) if each.code == "pull-secret-unused"]
    assert unused == [
        "Secret other has no credentials for registry.example/train:1",
        "Secret keys holds no credentials for a registry, so the kubelet ignores it",
    ]


def test_queue_that_kueue_requires_and_the_target_does_not_name_is_found(lab: Lab, namespace: str, place) -> None:
    there = {**place(""), "queue": None}
    with other_kueue(lab, all_in_queues(namespace)):
        until(there, {"queue-required"})


def test_namespace_that_is_not_there(place) -> None:
    assert set(found({**place("referenced-object-missing"), "namespace": "nowhere", "queue": None})) >= {
        "namespace-missing"
    }


POLICY = """
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: NAME}
spec:
  failurePolicy: Fail
  matchConstraints:
    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NAME}}
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}]
  validations:
  - {expression: "has(object.metadata.labels) && 'team' in object.metadata.labels", message: pods name their team}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: NAME}
spec: {policyName: NAME, validationActions: [Deny]}
"""
LIMITED = """
apiVersion: v1
kind: ResourceQuota
metadata: {name: limited, namespace: NAME}
spec: {hard: {limits.cpu: "100"}}
"""


def test_what_is_said_against_a_runs_pods_is_found_before_it_is_started(lab: Lab, namespace: str, place) -> None:
    there = {**place("referenced-object-missing"), "image_pull_secrets": [], "priority_class": None}
    assert found(there) == {}
    try:
        lab.kubectl("create", "-f", "-", input=POLICY.replace("NAME", namespace))
        finding = until(there, {"policy-refused"})["policy-refused"]
        assert "pods name their team" in finding.what
    finally:
        for kind in ("validatingadmissionpolicy", "validatingadmissionpolicybinding"):
            lab.kubectl("delete", kind, namespace, "--ignore-not-found", "--wait=false")
    until(there, set())

    lab.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    finding = until({**there, "user": 0}, {"pods-forbidden"})["pods-forbidden"]
    assert "violates PodSecurity" in finding.what
    assert found(there) == {}

    lab.kubectl("create", "-f", "-", input=LIMITED.replace("NAME", namespace))
    finding = until(there, {"pods-forbidden"})["pods-forbidden"]
    assert "limits.cpu" in finding.what
    lab.kubectl("delete", "resourcequota", "limited", "-n", namespace)
    until(there, set())

    absent = until({**there, "service_account": "absent"}, {"referenced-object-missing"})["referenced-object-missing"]
    assert "absent" in absent.what


def test_user_who_may_not_make_the_runs_object_is_not_told_that_kueue_is_off(
    lab: Lab, namespace: str, place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    besides = "create jobsets.jobset.x-k8s.io"
    there = {**place(""), "queue": "train"}
    user(lab, namespace, "fay", rules(there, besides), tmp_path / "fay")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "fay"))
    findings = until(there, {"not-permitted"})
    assert findings["not-permitted"].evidence == (besides,)
    asked = render_context(Case(job={**SMALL, "secrets": {}}, target=there))
    seen = collect_inventory(asked)
    assert seen.suspended_by_kueue is None
    assert any("create pods" in each for each in seen.not_readable)
    for kind in ("clusterqueue", "resourceflavor"):
        lab.kubectl("delete", kind, namespace, "--ignore-not-found", "--wait=false")


def rules(place: Mapping[str, Any], besides: str = "") -> Sequence[Mapping[str, Any]]:
    """What a user needs to start runs, but for one thing, and what its controllers need, which it has to have too."""
    asked = render_context(Case(job={**SMALL, "secrets": {}}, target=place))
    (role,) = [each for each in render(asked).objects if each["kind"] == "Role"]
    own = [
        {
            "apiGroups": [right.group],
            "resources": [f"{right.resource}/{right.subresource}".rstrip("/")],
            "verbs": [right.verb],
        }
        for right in required_permissions(asked)
        if str(right) != besides
    ]
    # Of whichever run: names of runs are not known beforehand.
    controllers = [{key: value for key, value in rule.items() if key != "resourceNames"} for rule in role["rules"]]
    return [*own, *controllers]


def await_rights(lab: Lab, namespace: str, account: str) -> None:
    """Wait until the API server goes by an account's role, of which it judges by a copy: one that lists pods."""
    who = f"--as=system:serviceaccount:{namespace}:{account}"
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            lab.kubectl("auth", "can-i", "list", "pods", "-n", namespace, who)
            return
        except HoldfastError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def user(lab: Lab, namespace: str, name: str, rules: Sequence[Mapping[str, Any]], kubeconfig: Path) -> None:
    """Write the kubeconfig of one who may do this, in the namespace, and nothing else."""
    about = {"name": name, "namespace": namespace}
    group = "rbac.authorization.k8s.io"
    things = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": about, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": about,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", **about}],
        },
    ]
    lab.kubectl("create", "-f", "-", input="\n---\n".join(map(json.dumps, things)))
    await_rights(lab, namespace, name)
    document = json.loads(lab.kubeconfig.read_text())
    document["users"][0]["user"] = {"token": lab.kubectl("create", "token", name, "-n", namespace).strip()}
    kubeconfig.write_text(json.dumps(document))


def test_user_who_may_do_just_what_is_needed_can_run_and_with_less_cannot(
    lab: Lab, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"namespace": namespace, "queue": None, "volume": None}
    for name, besides, codes in (
        ("ann", "", set[str]()),
        ("ben", "create secrets", {"not-permitted"}),
        ("cem", "create pods/portforward", {"not-permitted"}),
    ):
        kubeconfig = tmp_path / name
        user(lab, namespace, name, rules(there, besides), kubeconfig)
        with monkeypatch.context() as patch:
            patch.setenv("KUBECONFIG", str(kubeconfig))
            findings = until(there, codes)
        for finding in findings.values():
            assert finding.evidence == (besides,)


def test_user_who_may_not_do_what_a_controller_may_is_told(
    lab: Lab, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"namespace": namespace, "queue": None, "volume": None}
    own = [rule for rule in rules(there) if "delete" not in rule["verbs"] or rule["resources"] != ["pods"]]
    user(lab, namespace, "dan", own, tmp_path / "dan")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "dan"))
    finding = until(there, {"not-permitted"})["not-permitted"]
    assert "controller" in finding.what
    assert "pods" in finding.what
