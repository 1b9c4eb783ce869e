"""Why a run waits, from objects that the lab's real control plane showed.

`HOLDFAST_WRITE_GOLDEN=1 pytest -m slow` on this file has the lab show them anew.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.golden import WRITE
from tests.launch.kubernetes.golden_cases import Case, render_context

from holdfast.findings import Finding
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.manifests.yaml_writer import to_plain
from holdfast.launch.kubernetes.pending_reason.collect_pending import read_run as look
from holdfast.launch.kubernetes.pending_reason.pending_rules import PENDING_RULES, PendingRun, find_pending_reason
from lab import Lab, programs

RECORDED = Path(__file__).parent / "pending"
WITHIN_S = 240.0
RUN = "llama-000000"
OWNER = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{{namespace}}/jobsets/{RUN}"

Change = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""What of a program's configuration is otherwise."""

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
    "volume-elsewhere": ("volume-elsewhere", "can mount its volume, which is elsewhere"),
    "gang-ahead": ("run-queued", "it stands in queue train, behind others"),
    "image": ("image-pull-failed", "its image cannot be pulled: "),
    "webhook-refused": ("webhook-refused", "the webhook no.holdfast.test refuses its pods: not on Saturdays"),
    "queue-required": ("queue-required", "holds back whatever is in no queue"),
    "integration-off": ("kueue-integration-disabled", "its integration with JobSet may be off"),
    "webhook-down": ("webhook-down", "nothing can be made here: the webhook gone.holdfast.test does not answer"),
    "pod-security": ("pods-forbidden", "violates PodSecurity"),
    "namespace-quota": ("pods-forbidden", "exceeded quota"),
    "suspended": ("run-suspended", "it is suspended"),
    "placement-without-requests": ("placement-needs-requests", "requests nothing"),
}
"""By the situation: the code, and words of the sentence."""


def recorded(name: str) -> PendingRun:
    return PendingRun(**json.loads((RECORDED / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", EXPECTED)
def test_reason_is_found_in_what_the_lab_showed(name: str) -> None:
    check(name, find_pending_reason(recorded(name)))


def check(name: str, finding: Finding | None) -> None:
    code, words = EXPECTED[name]
    assert finding is not None
    assert (finding.code, words in finding.what) == (code, True), finding
    assert finding.evidence
    assert finding.remedy
    assert "\n" not in finding.what


FIRST = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: WorkloadPriorityClass
metadata: {name: pending-first}
value: 1000
"""
QUOTA_RESERVED = {"quota-in-use": "True", "gang-ahead": "False"}
"""Of a run that is there before, once its queue has seen it."""


def test_queue_that_makes_nothing_of_a_run_is_told_from_one_that_lets_it_wait() -> None:
    seen = recorded("suspended")
    owner = json.loads(json.dumps(seen.owner))
    owner["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "train"
    unmanaged = find_pending_reason(PendingRun(owner=owner))
    assert unmanaged is not None
    assert unmanaged.code == "kueue-integration-disabled"
    new = find_pending_reason(PendingRun(owner=owner, age_s=1.0))
    assert new is not None
    assert (new.code, "not taken it up yet" in new.what) == ("run-queued", True)
    waiting = find_pending_reason(PendingRun(owner=owner, workload={"metadata": {"name": "w"}, "spec": {}}))
    assert waiting is not None
    assert waiting.code == "run-queued"


def test_gang_of_the_scheduler_names_its_room_whichever_pod_says_so() -> None:
    told = (
        "0/4 nodes are available: 4 Insufficient cpu.",
        "minCount (3) cannot be satisfied: 1 scheduled, 1 remaining",
    )
    pods = [
        {
            "metadata": {"name": f"{RUN}-node-{number}"},
            "spec": {"schedulingGroup": {"podGroupName": RUN}},
            "status": {"conditions": [{"type": "PodScheduled", "status": "False", "message": message}]},
        }
        for number, message in enumerate(told)
    ]
    owner = {"kind": "JobSet", "metadata": {"name": RUN}, "spec": {}}
    finding = find_pending_reason(PendingRun(owner=owner, pods=pods))
    assert finding is not None
    assert (finding.code, finding.where) == ("pod-group-waiting", f"podgroup {RUN}")
    assert "its 3 nodes are placed together or not at all, and now 1 of them would fit" in finding.what
    assert finding.evidence == ("; ".join(told),)


def test_pod_that_is_gated_names_its_gates() -> None:
    told = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "SchedulingGated",
        "message": "Scheduling is blocked due to non-empty scheduling gates",
    }
    gated = {
        "metadata": {"name": f"{RUN}-controller-x"},
        "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
        "status": {"phase": "Pending", "conditions": [told]},
    }
    owner = {"kind": "JobSet", "metadata": {"name": RUN}, "spec": {}}
    finding = find_pending_reason(PendingRun(owner=owner, pods=[gated]))
    assert finding is not None
    assert (finding.code, finding.where) == ("pods-gated", f"pod {RUN}-controller-x")
    assert "until kueue.x-k8s.io/admission is removed" in finding.what


@pytest.mark.parametrize(
    ("waiting", "code"),
    [
        ({"reason": "ErrImagePull", "message": 'pull access denied for "x"'}, "image-pull-failed"),
        ({"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}, "image-pull-failed"),
        ({"reason": "CreateContainerConfigError", "message": 'secret "x" not found'}, "container-create-failed"),
        ({"reason": "ContainerCreating"}, "pods-starting"),
    ],
)
def test_what_a_kubelet_says_of_a_container_is_understood(waiting: dict[str, str], code: str) -> None:
    pod = {"metadata": {"name": "p"}, "status": {"containerStatuses": [{"state": {"waiting": waiting}}]}}
    owner = {"kind": "JobSet", "metadata": {"name": RUN}, "spec": {}}
    finding = find_pending_reason(PendingRun(owner=owner, pods=[pod]))
    assert finding is not None
    assert finding.code == code


@pytest.mark.parametrize(
    ("container", "code"),
    [
        # As the lab's kubelet has it, and containerd's.
        (
            {"state": {"terminated": {"reason": "StartError", "message": "/usr/sbin/sshd: [Errno 2]"}}},
            "image-without-sshd",
        ),
        (
            {
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                "lastState": {
                    "terminated": {
                        "reason": "StartError",
                        "message": 'exec: "/usr/sbin/sshd": stat /usr/sbin/sshd: no such file or directory: unknown',
                    }
                },
            },
            "image-without-sshd",
        ),
        (
            {"state": {"terminated": {"reason": "StartError", "message": 'exec: "train": not found'}}},
            "container-start-failed",
        ),
        (
            {
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                "lastState": {"terminated": {"reason": "Error", "exitCode": 3}},
                "restartCount": 4,
            },
            "container-crash-looping",
        ),
    ],
)
def test_container_that_does_not_stay_is_told_of_with_its_last_words(container: dict[str, Any], code: str) -> None:
    pod = {"metadata": {"name": "p"}, "status": {"containerStatuses": [container]}}
    owner = {"kind": "MPIJob", "metadata": {"name": RUN}, "spec": {}}
    finding = find_pending_reason(PendingRun(owner=owner, pods=[pod]))
    assert finding is not None
    assert finding.code == code


def test_container_that_has_ended_well_is_no_reason() -> None:
    ended = {"state": {"terminated": {"reason": "Completed", "exitCode": 0}}}
    pod = {"metadata": {"name": "p"}, "status": {"containerStatuses": [ended]}}
    assert (
        find_pending_reason(PendingRun(owner={"kind": "JobSet", "metadata": {"name": RUN}, "spec": {}}, pods=[pod]))
        is None
    )


def test_namespace_that_is_being_deleted_goes_before_all_else() -> None:
    seen = recorded("insufficient")
    ending = {"metadata": {"deletionTimestamp": "2026-11-21T20:00:00Z"}}
    finding = find_pending_reason(PendingRun(owner=seen.owner, pods=seen.pods, namespace=ending))
    assert finding is not None
    assert finding.code == "namespace-terminating"


@pytest.mark.parametrize(
    ("made_by", "at", "told"),
    [
        ("llama-000000-node-0", "2026-11-22T00:00:00Z", True),
        ("llama-000000-node-1", "2026-11-22T00:00:00Z", False),
        ("llama-000000-node-1", "2026-11-21T00:00:00Z", True),
    ],
)
def test_pod_that_is_not_made_is_told_of_though_others_are(made_by: str, at: str, told: bool) -> None:
    seen = recorded("pod-security")
    of_node_1 = [one for one in seen.events if one["involvedObject"]["name"].endswith("node-1")]
    assert of_node_1
    pod = {"metadata": {"name": "any", "creationTimestamp": at, "ownerReferences": [{"name": made_by}]}}
    finding = find_pending_reason(replace(seen, events=of_node_1, pods=[pod]))
    assert (finding.code if finding else None) == ("pods-forbidden" if told else None)


def test_run_whose_pods_run_is_not_pending() -> None:
    pod = {"metadata": {"name": "p"}, "status": {"conditions": [{"type": "PodScheduled", "status": "True"}]}}
    assert (
        find_pending_reason(PendingRun(owner={"kind": "JobSet", "metadata": {"name": RUN}, "spec": {}}, pods=[pod]))
        is None
    )


def test_every_reason_fills_in_what_it_found() -> None:
    for reason in PENDING_RULES:
        assert reason.message.format_map(dict.fromkeys(re.compile(reason.pattern).groupindex, "x")), reason.code


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
  queueingStrategy: ORDER
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
- name: WHO.holdfast.test
  clientConfig: WHERE
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}]
  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NAME}}
  sideEffects: None
  admissionReviewVersions: [v1]
"""

ONE_POD = """
apiVersion: v1
kind: ResourceQuota
metadata: {name: one, namespace: NAME}
spec: {hard: {pods: "1"}}
"""

RACK = "cloud.provider.com/topology-rack"
TOPOLOGY = f"""
apiVersion: kueue.x-k8s.io/v1beta2
kind: Topology
metadata: {{name: NAME}}
spec: {{levels: [{{nodeLabel: {RACK}}}]}}
---
"""

ELSEWHERE = """
apiVersion: v1
kind: PersistentVolume
metadata: {name: NAME}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteMany]
  csi: {driver: lustre.csi.storage.gke.io, volumeHandle: none}
  claimRef: {namespace: NAME, name: checkpoints}
  nodeAffinity:
    required:
      nodeSelectorTerms: [{matchExpressions: [{key: topology.gke.io/zone, operator: In, values: [elsewhere]}]}]
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: checkpoints, namespace: NAME}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  volumeName: NAME
  resources: {requests: {storage: 1Gi}}
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
    # Kueue admits the run: it does not look at volumes.
    "volume-elsewhere": (
        "---".join((NODE.replace("TAINTS", "[]"), ELSEWHERE, QUEUE.replace("QUOTA", "8"))),
        {"gpus_per_node": 4},
        {"volume": {"claim": "checkpoints"}},
    ),
    "gang-ahead": (QUEUE.replace("QUOTA", "16").replace("ORDER", "StrictFIFO"), {}, {}),
    "image": (
        "",
        {"image": "missing.example/train:1", "gpus_per_node": 0, "secrets": {}},
        # Machines that KWOK pretends pull anything.
        {"queue": None, "agent": False, "node_selector": {"cloud.provider.com/topology-block": "b0"}},
    ),
    "webhook-down": (
        WEBHOOK.replace("WHO", "gone").replace("WHERE", '{url: "https://127.0.0.1:9/gone"}'),
        {},
        {"queue": None},
    ),
    "webhook-refused": (WEBHOOK.replace("WHO", "no"), {}, {"queue": None}),
    "pod-security": ("", {"fabric": "oke-roce"}, {"queue": None}),
    "namespace-quota": (ONE_POD, {"gpus_per_node": 0, "secrets": {}}, {"queue": None}),
    "suspended": ("", {}, {"queue": None}),
    "placement-without-requests": (
        TOPOLOGY
        + QUEUE.replace("QUOTA", "8").replace(
            "{nodeLabels: {for: NAME}}", "{nodeLabels: {for: NAME}, topologyName: NAME}"
        ),
        {"gpus_per_node": 0, "secrets": {}, "placement": "rack"},
        {"topology_levels": {"rack": RACK}},
    ),
}
"""What is there beforehand, and what differs in the job and in the place."""

AHEAD: Mapping[str, Mapping[str, Any]] = {"quota-in-use": {}, "gang-ahead": {"nodes": 4}}
"""What another run asks for that is there before: all of the quota, or more than there is, at the queue's head."""


@pytest.fixture
def refusing(lab: Lab) -> Iterator[str]:
    """With a webhook that refuses every request."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            no = {"uid": asked["request"]["uid"], "allowed": False, "status": {"message": "not on Saturdays"}}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                json.dumps({key: asked[key] for key in ("apiVersion", "kind")} | {"response": no}).encode()
            )

        def log_message(self, format: str, *args: object) -> None:
            pass

    pki = lab.folder / "pki"
    identity = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    identity.load_cert_chain(pki / "tls.crt", pki / "tls.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.socket = identity.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        authority = base64.b64encode((pki / "ca.crt").read_bytes()).decode()
        yield json.dumps({"url": f"https://127.0.0.1:{server.server_port}/no", "caBundle": authority})
        server.shutdown()


def observed(namespace: str) -> PendingRun:
    """What the API server shows of a run."""
    return asyncio.run(look(ClusterClient(namespace=namespace), OWNER))


def owner(namespace: str, job: Mapping[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a run in a namespace, whose name stands for NAME."""
    there = json.loads(json.dumps({"volume": None, **place, "namespace": namespace}).replace("NAME", namespace))
    return to_plain(render(render_context(Case(job={"resources": {}, **job}, target=there))).owner)


def reserved(lab: Lab, namespace: str) -> str:
    """What is said of the quota of the one workload in a namespace; empty where there is none yet, or nothing said."""
    said = "jsonpath={.items[*].status.conditions[?(@.type=='QuotaReserved')].status}"
    return lab.kubectl("get", "workloads.kueue.x-k8s.io", "-n", namespace, "-o", said)


def found(lab: Lab, situation: str, namespace: str) -> None:
    """Wait until the situation is explained as it should be: what is new is kept from a run by other things first."""
    code, words = EXPECTED[situation]
    deadline = time.monotonic() + WITHIN_S
    while True:
        time.sleep(0.5)
        seen = observed(namespace)
        finding = find_pending_reason(seen)
        explained = finding is not None and finding.code == code and words in finding.what
        if explained or time.monotonic() > deadline:
            break
    if WRITE:
        RECORDED.mkdir(exist_ok=True)
        (RECORDED / f"{situation}.json").write_text(json.dumps(trimmed(seen), indent=1) + "\n")
    check(situation, finding)


@pytest.mark.slow
def test_lab_shows_each_reason(lab: Lab, refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All situations together, each in a separate namespace."""
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    names = {situation: f"pending-{situation}" for situation in SITUATIONS}
    things = [f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}}}\n" for name in names.values()]
    ahead: list[str] = []
    runs: list[str] = []
    for situation, (before, job, place) in SITUATIONS.items():
        name = names[situation]
        there = before.replace("STOP", "None").replace("ORDER", "BestEffortFIFO").replace("WHERE", refusing)
        things.append(there.replace("NAME", name))
        run = owner(name, job, place)
        if situation == "suspended":
            run["spec"]["suspend"] = True
        if situation in AHEAD:
            first = owner(name, {**job, **AHEAD[situation]}, place)
            first["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "pending-first"
            ahead.append(json.dumps(first).replace(RUN, "first-000000"))
        runs.append(json.dumps(run))
    lab.kubectl("create", "-f", "-", input="\n---\n".join(filter(str.strip, [FIRST, *things])))
    lab.kubectl("label", "namespace", names["pod-security"], "pod-security.kubernetes.io/enforce=restricted")
    try:
        # Until it is counted, a quota lets everything pass.
        counted = ("resourcequota/one", "--for=jsonpath={.status.hard.pods}=1", f"--timeout={WITHIN_S:g}s")
        lab.kubectl("-n", names["namespace-quota"], "wait", *counted)
        lab.kubectl("create", "-f", "-", input="\n---\n".join(ahead))
        deadline = time.monotonic() + WITHIN_S
        for situation in AHEAD:
            while reserved(lab, names[situation]) != QUOTA_RESERVED[situation]:
                assert time.monotonic() < deadline, situation
                time.sleep(0.2)
        lab.kubectl("create", "-f", "-", input="\n---\n".join(runs))
        for situation, name in names.items():
            found(lab, situation, name)
    finally:
        lab.kubectl("delete", "namespace", *names.values(), "--wait=false")
        lab.kubectl("delete", "validatingwebhookconfiguration", names["webhook-down"], names["webhook-refused"])
        queues = [names[situation] for situation, (before, *_) in SITUATIONS.items() if "ClusterQueue" in before]
        for kind in ("clusterqueue", "resourceflavor"):
            lab.kubectl("delete", kind, *queues, "--wait=false")
        lab.kubectl("delete", "topology", names["placement-without-requests"], "--wait=false")
        lab.kubectl("delete", "workloadpriorityclass", "pending-first")
        # Another test's pods might come to stand on them.
        lab.kubectl(
            "delete",
            "node",
            *(names[situation] for situation, (before, *_) in SITUATIONS.items() if "kind: Node" in before),
        )
        lab.kubectl("delete", "persistentvolume", names["volume-elsewhere"], "--wait=false")


@pytest.mark.slow
def test_lab_shows_a_queue_whose_integration_is_off(lab: Lab, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))

    def without_jobsets(known: Mapping[str, Any]) -> Mapping[str, Any]:
        frameworks = [each for each in known["integrations"]["frameworks"] if "jobset" not in each]
        return {"integrations": {"frameworks": frameworks}}

    with other_kueue(lab, without_jobsets):
        lab.kubectl("create", "-f", "-", input=json.dumps(owner(namespace, {}, {})))
        found(lab, "integration-off", namespace)


@pytest.mark.slow
def test_lab_shows_that_a_queue_is_required(lab: Lab, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    with other_kueue(lab, all_in_queues(namespace)):
        lab.kubectl("create", "-f", "-", input=json.dumps(owner(namespace, {}, {"queue": None})))
        found(lab, "queue-required", namespace)


def all_in_queues(namespace: str) -> Change:
    """Has Kueue hold back what is in no queue, in this namespace."""
    there = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    return lambda _: {"manageJobsWithoutQueueName": True, "managedJobsNamespaceSelector": there}


@contextlib.contextmanager
def other_kueue(lab: Lab, change: Change) -> Iterator[None]:
    """Has Kueue run with a part of its configuration changed."""

    def changed(place: programs.LabPaths) -> programs.LabProgram:
        whole = programs.kueue(place)
        return dataclasses.replace(whole, configuration={**whole.configuration, **change(whole.configuration)})

    lab.kill("kueue")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(programs, "ALL", tuple(changed if each is programs.kueue else each for each in programs.ALL))
            lab.start("kueue")
        yield
    finally:
        lab.kill("kueue")
        lab.start("kueue")


def trimmed(seen: PendingRun) -> Any:
    """What is worth keeping of it."""
    keep = {
        "owner": {"kind": seen.owner["kind"], "metadata": named(seen.owner), "spec": switch(seen.owner["spec"])},
        "pods": [{"metadata": named(pod) | made(pod), "status": pod["status"]} for pod in seen.pods],
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


def made(pod: Mapping[str, Any]) -> dict[str, Any]:
    makers = [{"name": each["name"]} for each in pod["metadata"]["ownerReferences"]]
    return {"creationTimestamp": pod["metadata"]["creationTimestamp"], "ownerReferences": makers}


def switch(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {key: spec[key] for key in ("suspend",) if key in spec}
