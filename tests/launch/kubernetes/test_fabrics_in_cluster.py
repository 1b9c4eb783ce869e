"""Every fabric before the real API server, webhooks and scheduler: objects are accepted, what lacks is found."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from tests.launch.kubernetes.fabric_needs import needs
from tests.launch.kubernetes.golden_cases import FABRIC_CASES, TORCHRUN, Case, of_kind, render_context
from tests.launch.kubernetes.test_manifests_accepted import create
from tests.waiting import until

from holdfast.findings import Severity
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.run_manifests import RunManifests, render
from holdfast.launch.kubernetes.object_names import NODE, PART_LABEL
from holdfast.launch.kubernetes.preflight.cluster_checks import check_cluster
from holdfast.launch.kubernetes.preflight.collect_inventory import collect_inventory
from holdfast.launch.kubernetes.preflight.dry_run_pods import pods_of
from lab import Lab
from lab.client import LabClient

pytestmark = pytest.mark.slow

WITHIN_S = 120.0
CUSTOM = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: PLURAL.GROUP}
spec:
  group: GROUP
  scope: SCOPE
  names: {kind: KIND, plural: PLURAL, singular: SINGULAR}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
"""
ATTACHMENT = ("k8s.cni.cncf.io", "Namespaced", "NetworkAttachmentDefinition", "network-attachment-definitions")
NETWORK = ("networking.gke.io", "Cluster", "Network", "networks")
CLASS = "rdma.example.com"


def in_namespace(case: Case, namespace: str) -> Case:
    """The case there, without a queue and a volume."""
    small = {"resources": {"memory": "1GiB", "shm": "64MiB"}, "secrets": {}}
    return Case(
        job={**case.job, **small}, target={**case.target, "namespace": namespace, "queue": None, "volume": None}
    )


def test_every_object_that_a_fabric_changes_is_accepted_for_every_kind(lab: Lab, namespace: str) -> None:
    """Other objects do not differ from those over TCP, which test_manifests_accepted.py has accepted."""
    renderings, pods = list[RunManifests](), list[dict[str, Any]]()
    for workload in ("jobset", "trainjob", "pytorchjob", "mpijob", "leaderworkerset"):
        for name, case in FABRIC_CASES.items():
            job = {**case.job, "name": f"{name}-{workload}"}
            ctx = render_context(of_kind(Case(job=job, target={**case.target, "namespace": namespace}), workload))
            whole = render(ctx)
            claims = tuple(each for each in whole.owned if each["kind"] == "ResourceClaimTemplate")
            assert bool(claims) == (ctx.pod_access.claim is not None)
            renderings.append(replace(whole, owned=claims))
            pods += [pod for pod in pods_of(ctx, whole.objects) if pod["metadata"]["labels"][PART_LABEL] == NODE]
    answer = create(lab, *renderings, judged_only=True)
    assert answer.count("created (server dry run)") == sum(1 + len(each.owned) for each in renderings)
    assert answer.count("jobset.jobset.x-k8s.io") == answer.count("mpijob.kubeflow.org") == len(FABRIC_CASES)
    answer = lab.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input=json_list(pods))
    assert answer.count("created (server dry run)") == len(pods) == 5 * len(FABRIC_CASES)


def json_list(objects: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


def custom(lab: Lab, group: str, scope: str, kind: str, plural: str) -> None:
    """Have a kind of object served."""
    text = CUSTOM.replace("PLURAL", plural).replace("GROUP", group).replace("SCOPE", scope)
    text = text.replace("KIND", kind).replace("SINGULAR", kind.lower())
    lab.kubectl("create", "-f", "-", input=text)
    lab.kubectl("wait", "crd", f"{plural}.{group}", "--for=condition=Established", f"--timeout={WITHIN_S:g}s")


def errors(ctx: RenderContext) -> list[str]:
    """What `check` finds that keeps a run from starting."""
    found = check_cluster(ctx, collect_inventory(ctx))
    return sorted(each.what for each in found if each.severity is Severity.ERROR)


def machine(name: str, namespace: str, **devices: str) -> dict[str, Any]:
    """A machine for the runs of a namespace, with GPUs and these devices."""
    amounts = {"cpu": "64", "memory": "64Gi", "pods": "9", "nvidia.com/gpu": "8", **devices}
    labels = {"type": "kwok", "for": namespace}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"{namespace}-{name}", "labels": labels},
        "status": {"allocatable": amounts, "capacity": amounts},
    }


@contextlib.contextmanager
def created(lab: Lab, client: LabClient, objects: list[dict[str, Any]]) -> Iterator[None]:
    """Objects that are there meanwhile; machines are ready, which a new one is not at once."""
    machines = [each["metadata"]["name"] for each in objects if each["kind"] == "Node"]

    def tainted() -> list[str]:
        return [name for name in machines if client.get(f"/api/v1/nodes/{name}")["spec"].get("taints")]

    try:
        lab.kubectl("create", "-f", "-", input=json_list(objects))
        until(lambda: not tainted(), "the machines are ready")
        yield
    finally:
        lab.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", input=json_list(objects))


def test_all_that_each_fabric_lacks_is_found_until_it_is_there(
    lab: Lab, lab_client: LabClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    here = {"node_selector": {"for": namespace}, "agent": False}  # without agents a run has fewer objects to judge
    asked = {
        name: render_context(
            in_namespace(Case(job={**case.job, **TORCHRUN}, target={**case.target, **here}), namespace)
        )
        for name, case in FABRIC_CASES.items()
    }
    wanted = {name: needs(name) for name in asked}
    all_needs = list(dict.fromkeys(need for each in wanted.values() for need in each))
    lacking = {name: sorted(need.finding for need in each) for name, each in wanted.items()}
    plain = [machine(name, namespace) for name in "ab"]
    most = {need.resource: str(need.amount) for need in sorted(all_needs, key=lambda need: str(need.amount).zfill(9))}
    equipped = [machine(name, namespace, **{each: most[each] for each in most if each}) for name in "cd"]
    objects = [need.manifest(namespace) for need in all_needs if need.kind]
    spaces = {each["metadata"].get("namespace", namespace) for each in objects} - {namespace, "kube-system"}
    places = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in sorted(spaces)]
    with created(lab, lab_client, plain):
        assert {name: errors(ctx) for name, ctx in asked.items()} == lacking
        try:
            custom(lab, *ATTACHMENT)
            custom(lab, *NETWORK)
            assert errors(asked["gke-tcpxo"]) == lacking["gke-tcpxo"], "the kind is known now, and no object is there"
            with created(lab, lab_client, places), created(lab, lab_client, [*equipped, *objects]):
                # The others differ in resources of machines alone: test_cluster_checks.py has each of them there.
                with_objects = [name for name in asked if any(need.kind for need in wanted[name])]
                assert {name: errors(asked[name]) for name in with_objects} == {name: [] for name in with_objects}
        finally:
            for kind in (ATTACHMENT, NETWORK):
                lab.kubectl("delete", "crd", f"{kind[3]}.{kind[0]}", "--ignore-not-found")


@pytest.fixture
def adapters(lab: Lab, namespace: str) -> Iterator[Callable[[int], None]]:
    """Gives a machine of the test eight adapters, as a driver publishes them."""
    machines = [machine(str(number), namespace) for number in range(3)]
    selects = {"selectors": [{"cel": {"expression": f"device.driver == '{CLASS}'"}}]}
    device_class = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": CLASS},
        "spec": selects,
    }
    lab.kubectl("create", "-f", "-", input=json_list([*machines, device_class]))

    def publish(number: int) -> None:
        name = f"{namespace}-{number}"
        devices = [{"name": f"nic-{nic}", "attributes": {"up": {"bool": nic < 8}}} for nic in range(9)]
        spec = {
            "driver": CLASS,
            "nodeName": name,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        }
        made = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}
        lab.kubectl("create", "-f", "-", input=json.dumps(made))

    yield publish
    lab.kubectl("delete", "resourceslice", "--all")
    lab.kubectl("delete", "deviceclass", CLASS)
    lab.kubectl("delete", "node", *(f"{namespace}-{number}" for number in range(3)))


@pytest.mark.parametrize("workload", ["jobset", "trainjob"])
def test_scheduler_places_nodes_where_the_claimed_adapters_are(
    lab: Lab, namespace: str, adapters: Callable[[int], None], workload: str
) -> None:
    case = in_namespace(FABRIC_CASES["dra"], namespace)
    device = {"device_class": CLASS, "per_node": 8, "selector": f"device.attributes['{CLASS}'].up"}
    target = {**case.target, "fabric_device": device, "node_selector": {"for": namespace}, "agent": False}
    adapters(0)
    create(lab, render(render_context(of_kind(Case(job={**case.job, "launch": "per-node"}, target=target), workload))))

    def placed() -> set[str]:
        found = json.loads(lab.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
        return {pod["spec"]["nodeName"] for pod in found if "nodeName" in pod["spec"]}

    until(lambda: placed() == {f"{namespace}-0"}, "the first node is placed")
    adapters(2)
    until(lambda: placed() == {f"{namespace}-0", f"{namespace}-2"}, "both nodes are placed")
    claims = json.loads(lab.kubectl("get", "resourceclaims", "-n", namespace, "-o", "json"))["items"]
    given = [each["status"]["allocation"]["devices"]["results"] for each in claims]
    assert [sorted(device["device"] for device in each) for each in given] == [[f"nic-{nic}" for nic in range(8)]] * 2
