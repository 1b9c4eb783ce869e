"""Admission policies before the real API server: what they refuse, in which words, and that our own runs pass."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.launch.kubernetes.golden_cases import Case, of_kind, render_context
from tests.launch.kubernetes.test_fabrics_in_cluster import json_list

from holdfast.job.targets import TargetSpec
from holdfast.launch.kubernetes.manifests.policies import RULES, render_policies
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.manifests.yaml_writer import to_plain
from holdfast.launch.kubernetes.preflight.cluster_checks import check_cluster
from holdfast.launch.kubernetes.preflight.collect_inventory import collect_inventory
from holdfast.launch.kubernetes.preflight.dry_run_pods import pods_of
from holdfast.launch.policy_request import PolicyRequest
from lab import Lab

pytestmark = pytest.mark.slow

WITHIN_S = 120.0
ALL = PolicyRequest(fabrics=["tcp", "sriov"], labels=["team"])
SMALL: Mapping[str, Any] = {"secrets": {}, "resources": {"memory": "1GiB", "shm": "64MiB"}}


def approved(namespace: str) -> Case:
    """A run that the policies allow."""
    return Case(job=SMALL, target={"namespace": namespace})


def node_pod(case: Case) -> dict[str, Any]:
    """The pod of a node, labelled with its team."""
    ctx = render_context(case)
    (pod, *_) = [each for each in pods_of(ctx, render(ctx).objects) if each["metadata"]["name"].endswith("-node")]
    pod["metadata"]["labels"]["team"] = "ml"
    return pod


@pytest.fixture
def policed(lab: Lab, namespace: str) -> Iterator[str]:
    """A namespace with all policies."""
    objects = list(map(to_plain, render_policies(TargetSpec(kind="kubernetes", namespace=namespace), ALL)))
    assert len(objects) == 2 * len(RULES)
    lab.kubectl("create", "-f", "-", input=json_list(objects))
    yield namespace
    for each in objects:
        lab.kubectl("delete", each["kind"], each["metadata"]["name"], "--wait=false")


def answer(lab: Lab, thing: Mapping[str, Any]) -> str:
    """What the API server says of an object in a dry run."""
    command, text = lab.kubectl_command("create", "--dry-run=server", "-f", "-"), json.dumps(thing)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    return done.stdout + done.stderr


def refused(lab: Lab, thing: Mapping[str, Any], policy: str) -> str:
    """The refusal by a policy, once the API server has it compiled."""
    deadline = time.monotonic() + WITHIN_S
    while f"holdfast-policy-{policy}-" not in (said := answer(lab, thing)):
        assert time.monotonic() < deadline, said
        time.sleep(0.2)
    return said


def test_each_policy_refuses_what_it_is_about_and_allows_a_run_that_is_right(
    lab: Lab, policed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    case, here = approved(policed), {"namespace": policed}
    good = node_pod(case)
    no_shm, unlabelled = json.loads(json.dumps(good)), json.loads(json.dumps(good))
    no_shm["spec"]["volumes"][0]["emptyDir"].pop("medium")
    assert "64 MiB" in refused(lab, no_shm, "shm")
    unlabelled["metadata"]["labels"].pop("team")
    assert "need the label `team`" in refused(lab, unlabelled, "labels")
    lost = Case(job=SMALL, target={**here, "volume": None})
    assert "lost with the pod" in refused(lab, node_pod(lost), "storage")
    other = Case(job={**SMALL, "fabric": "infiniband"}, target={**here, "fabric_device": {"resource": "rdma/ib"}})
    assert "may use the fabrics tcp, sriov" in refused(lab, node_pod(other), "fabric")
    for workload in ("jobset", "pytorchjob", "mpijob", "leaderworkerset"):
        alone = of_kind(Case(job=SMALL, target={**here, "queue": None}), workload)
        assert "without a queue" in refused(lab, to_plain(render(render_context(alone)).owner), "gang")
        if workload == "jobset":
            for scheduler in ("kubernetes", "volcano"):
                grouped = Case(job=alone.job, target={**alone.target, "pod_group": scheduler})
                assert "created (server dry run)" in answer(lab, to_plain(render(render_context(grouped)).owner))
        queued = render(render_context(of_kind(case, workload))).owner
        assert "created (server dry run)" in answer(lab, to_plain(queued))
    stored = Case(job={**SMALL, "checkpoint": {"path": "s3://bucket/run"}}, target={**here, "volume": None})
    metadata, containers = {"name": "any", "namespace": policed}, [{"name": "a", "image": "a"}]
    without_gpus = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}
    for allowed in (good, node_pod(stored), without_gpus):
        assert "created (server dry run)" in answer(lab, allowed)
    asked = render_context(other)
    found = {each.code: each.what for each in check_cluster(asked, collect_inventory(asked))}
    assert "the cluster's policy holdfast-policy-" in found["policy-refused"]


def test_nothing_is_requested_of_fabrics_and_labels_unless_they_are_named() -> None:
    spec = TargetSpec(kind="kubernetes", namespace="ml", gpu_resource="amd.com/gpu")
    objects = list(map(to_plain, render_policies(spec, PolicyRequest(enforce=False))))
    names = {each["metadata"]["name"] for each in objects}
    assert names == {f"holdfast-policy-{name}-ml" for name in ("shm", "storage", "gang")}
    bindings = [each for each in objects if each["kind"].endswith("Binding")]
    assert all(each["spec"]["validationActions"] == ["Warn", "Audit"] for each in bindings)
    assert "amd.com/gpu" in json.dumps(objects)
