"""Why a run waits, from objects that the lab's real control plane showed.

`HOLDFAST_WRITE_GOLDEN=1 pytest -m slow` on this file has the lab show them anew.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.launch.kubernetes.cases import Case, submission

from holdfast.findings import Finding
from holdfast.launch.kubernetes.pending import REASONS, Seen, pending
from holdfast.launch.kubernetes.render import render
from lab import Lab

RECORDED = Path(__file__).parent / "pending"
WRITE = os.environ.get("HOLDFAST_WRITE_GOLDEN") == "1"
WITHIN_S = 240.0
RUN = "llama-000000"

EXPECTED: Mapping[str, tuple[str, str]] = {
    "quota-too-small": (
        "quota-too-small",
        "it can never fit: it asks for 16 of nvidia.com/gpu, and the queue has 8 in",
    ),
    "quota-in-use": ("quota-in-use", "others hold the quota: 16 more of nvidia.com/gpu must be free"),
    "queue-missing": ("queue-missing", "there is no LocalQueue nowhere"),
    "queue-closed": ("queue-closed", "the ClusterQueue "),
    "no-such-flavor": ("no-such-flavor", "the queue has no flavor for it: flavor "),
    "insufficient": ("unschedulable", "Insufficient nvidia.com/gpu"),
    "taint": ("unschedulable", "untolerated taint"),
    "claim-missing": ("claim-missing", "the volume's claim checkpoints is not found"),
    "webhook-down": ("webhook-down", "nothing can be made here: the webhook gone.holdfast.test does not answer"),
    "pod-security": ("pods-forbidden", "violates PodSecurity"),
    "suspended": ("run-suspended", "it is suspended"),
}
"""By the situation: the code, and words of the sentence."""


def recorded(name: str) -> Seen:
    return Seen(**json.loads((RECORDED / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", EXPECTED)
def test_reason_is_found_in_what_the_lab_showed(name: str) -> None:
    check(name, pending(recorded(name)))


def check(name: str, finding: Finding | None) -> None:
    code, words = EXPECTED[name]
    assert finding is not None
    assert (finding.code, words in finding.what) == (code, True), finding
    assert finding.evidence
    assert finding.remedy
    assert "\n" not in finding.what


def test_queue_that_makes_nothing_of_a_run_is_told_from_one_that_lets_it_wait() -> None:
    seen = recorded("suspended")
    owner = json.loads(json.dumps(seen.owner))
    owner["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "train"
    unmanaged = pending(Seen(owner=owner))
    assert unmanaged is not None
    assert unmanaged.code == "queue-not-managing"
    waiting = pending(Seen(owner=owner, workload={"metadata": {"name": "w"}, "spec": {}}))
    assert waiting is not None
    assert waiting.code == "run-queued"


@pytest.mark.parametrize(
    ("waiting", "code"),
    [
        ({"reason": "ErrImagePull", "message": 'pull access denied for "x"'}, "image-not-pulled"),
        ({"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}, "image-not-pulled"),
        ({"reason": "CreateContainerConfigError", "message": 'secret "x" not found'}, "container-not-made"),
        ({"reason": "ContainerCreating"}, "pods-starting"),
    ],
)
def test_what_a_kubelet_says_of_a_container_is_understood(waiting: dict[str, str], code: str) -> None:
    pod = {"metadata": {"name": "p"}, "status": {"containerStatuses": [{"state": {"waiting": waiting}}]}}
    owner = {"kind": "JobSet", "metadata": {"name": RUN}, "spec": {}}
    finding = pending(Seen(owner=owner, pods=[pod]))
    assert finding is not None
    assert finding.code == code


def test_namespace_that_is_being_deleted_goes_before_all_else() -> None:
    seen = recorded("insufficient")
    ending = {"metadata": {"deletionTimestamp": "2026-11-21T20:00:00Z"}}
    finding = pending(Seen(owner=seen.owner, pods=seen.pods, namespace=ending))
    assert finding is not None
    assert finding.code == "namespace-ending"


def test_run_whose_pods_run_is_not_pending() -> None:
    pod = {"metadata": {"name": "p"}, "status": {"conditions": [{"type": "PodScheduled", "status": "True"}]}}
    assert pending(Seen(owner={"kind": "JobSet", "metadata": {"name": RUN}, "spec": {}}, pods=[pod])) is None


def test_every_reason_fills_in_what_it_found() -> None:
    for reason in REASONS:
        assert reason.says.count("{") <= reason.pattern.count("?P<"), reason.code


# Shown by the lab

NODE = """
apiVersion: v1
kind: Node
metadata: {name: NAME, labels: {type: kwok, for: NAME}}
spec: {taints: TAINTS}
status:
  allocatable: {cpu: "64", memory: 64Gi, pods: "20", nvidia.com/gpu: "4"}
  capacity: {cpu: "64", memory: 64Gi, pods: "20", nvidia.com/gpu: "4"}
"""
QUEUE = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: NAME}
spec: {nodeLabels: {for: NAME}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: NAME}
spec:
  namespaceSelector: {}
  stopPolicy: STOP
  resourceGroups:
  - coveredResources: [nvidia.com/gpu]
    flavors: [{name: NAME, resources: [{name: nvidia.com/gpu, nominalQuota: QUOTA}]}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: train, namespace: NAME}
spec: {clusterQueue: NAME}
"""
WEBHOOK = """
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: NAME}
webhooks:
- name: gone.holdfast.test
  clientConfig: {url: "https://127.0.0.1:9/gone"}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}]
  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NAME}}
  sideEffects: None
  admissionReviewVersions: [v1]
"""

SITUATIONS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "quota-too-small": (QUEUE.replace("QUOTA", "8"), {}, {}),
    "quota-in-use": (QUEUE.replace("QUOTA", "16"), {}, {}),
    "queue-missing": ("", {"queue": "nowhere"}, {}),
    "queue-closed": (QUEUE.replace("QUOTA", "64").replace("STOP", "Hold"), {}, {}),
    "no-such-flavor": (QUEUE.replace("QUOTA", "64"), {}, {"node_selector": {"for": "nobody"}}),
    "insufficient": (NODE.replace("TAINTS", "[]"), {}, {"queue": None, "node_selector": {"for": "NAME"}}),
    "taint": (
        NODE.replace("TAINTS", "[{key: example.com/kept, effect: NoSchedule}]"),
        {"gpus_per_node": 4},
        {"queue": None, "node_selector": {"for": "NAME"}},
    ),
    "claim-missing": (
        NODE.replace("TAINTS", "[]"),
        {"gpus_per_node": 4},
        {"queue": None, "volume": {"claim": "checkpoints"}, "node_selector": {"for": "NAME"}},
    ),
    "webhook-down": (WEBHOOK, {}, {"queue": None}),
    "pod-security": ("", {"fabric": "oke-roce"}, {"queue": None}),
    "suspended": ("", {}, {"queue": None}),
}
"""What is there beforehand, and what differs in the job and in the place."""


def observed(lab: Lab, namespace: str, run: str) -> Seen:
    """What the API server shows of a run, as the one who explains would ask for it."""
    base = f"/namespaces/{namespace}"

    def listed(path: str, key: Callable[[Any], bool]) -> list[Any]:
        found = lab.client().get(path)["items"]
        return [one for one in found if key(one)]

    workloads = listed(f"/apis/kueue.x-k8s.io/v1beta2{base}/workloads", lambda one: run in one["metadata"]["name"])
    return Seen(
        owner=lab.client().get(f"/apis/jobset.x-k8s.io/v1alpha2{base}/jobsets/{run}") | {"kind": "JobSet"},
        namespace=lab.client().get(f"/api/v1{base}"),
        pods=listed(f"/api/v1{base}/pods", lambda one: one["metadata"]["labels"].get("holdfast/run") == run),
        events=listed(f"/api/v1{base}/events", lambda one: one["involvedObject"]["name"].startswith(run)),
        workload=workloads[0] if workloads else None,
    )


@pytest.mark.slow
def test_lab_shows_each_reason(lab: Lab) -> None:
    """All situations at once, each in a namespace of its own."""
    names = {situation: f"pending-{situation}" for situation in SITUATIONS}
    things = [f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}}}\n" for name in names.values()]
    runs: list[str] = []
    for situation, (before, job, place) in SITUATIONS.items():
        name = names[situation]
        things.append(before.replace("NAME", name).replace("STOP", "None"))
        there = json.loads(json.dumps({"volume": None, **place, "namespace": name}).replace("NAME", name))
        case = Case(job={"resources": {}, **job}, place=there)
        rendering = render(submission(case))
        owner = rendering.objects[0]
        if situation == "suspended":
            owner["spec"]["suspend"] = True
        if situation == "quota-in-use":
            runs.append(json.dumps(owner).replace(RUN, "first-000000"))
        runs.append(json.dumps(owner))
    lab.kubectl("create", "-f", "-", input="\n---\n".join(filter(str.strip, things)))
    lab.kubectl("label", "namespace", names["pod-security"], "pod-security.kubernetes.io/enforce=restricted")
    try:
        lab.kubectl("create", "-f", "-", input="\n---\n".join(runs))
        for situation, name in names.items():
            deadline = time.monotonic() + WITHIN_S
            while True:
                seen = observed(lab, name, RUN)
                finding = pending(seen)
                if (finding is not None and finding.code == EXPECTED[situation][0]) or time.monotonic() > deadline:
                    break
            if WRITE:
                RECORDED.mkdir(exist_ok=True)
                (RECORDED / f"{situation}.json").write_text(json.dumps(trimmed(seen), indent=1) + "\n")
            check(situation, finding)
    finally:
        lab.kubectl("delete", "namespace", *names.values(), "--wait=false")
        lab.kubectl("delete", "validatingwebhookconfiguration", names["webhook-down"])
        # Another test's pods might come to stand on them.
        lab.kubectl("delete", "node", *(names[each] for each in ("insufficient", "taint", "claim-missing")))


def trimmed(seen: Seen) -> Any:
    """What is worth keeping of it."""
    keep = {
        "owner": {"kind": seen.owner["kind"], "metadata": named(seen.owner), "spec": switch(seen.owner["spec"])},
        "pods": [{"metadata": named(pod), "status": pod["status"]} for pod in seen.pods],
        "events": [
            {key: event.get(key) for key in ("type", "reason", "message", "lastTimestamp", "eventTime")}
            | {"involvedObject": {key: event["involvedObject"].get(key) for key in ("kind", "name")}}
            for event in seen.events
        ],
        "workload": seen.workload and {key: seen.workload[key] for key in ("status",) if key in seen.workload},
    }
    if keep["workload"] is not None and seen.workload is not None:
        keep["workload"]["metadata"] = named(seen.workload)
    return msgspec.to_builtins(keep)


def named(thing: Mapping[str, Any]) -> dict[str, Any]:
    return {key: thing["metadata"][key] for key in ("name", "labels") if key in thing["metadata"]}


def switch(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {key: spec[key] for key in ("suspend",) if key in spec}
