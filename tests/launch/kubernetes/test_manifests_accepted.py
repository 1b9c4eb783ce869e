"""Manifests before the real API server, with the real operators and their webhooks behind it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.launch.kubernetes.golden_cases import CASES, FABRIC_CASES, POD, Case, render_context, tree_context
from tests.launch.kubernetes.test_collect_inventory import await_rights

from holdfast.errors import HoldfastError
from holdfast.events import Outcome
from holdfast.fabric.catalog import CATALOG
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.incluster.controller_identity import had_earlier_controller, scale_to_zero
from holdfast.launch.kubernetes.incluster.kubernetes_backend import KubernetesBackend
from holdfast.launch.kubernetes.manifests.pod_patch import MERGE_KEYS
from holdfast.launch.kubernetes.manifests.run_manifests import RunManifests, render, render_tree
from holdfast.launch.kubernetes.manifests.yaml_writer import to_yaml
from holdfast.launch.kubernetes.preflight.dry_run_pods import pods_of
from holdfast.launch.kubernetes.preflight.pod_patch_checks import CONTAINER_FIELDS, POD_FIELDS
from holdfast.observe.monitoring_files import monitoring_objects
from holdfast.run_dir import RunDir
from lab import Lab
from lab.traefik_gateway import install_gateway_kinds
from lab.volcano_scheduler import install_kinds

pytestmark = pytest.mark.slow

WITHIN_S = 240.0
NUMBERS = {
    "jobset-tcp": "HOLDFAST_NODE_INDEX",
    "trainjob-tcp": "HOLDFAST_NODE_INDEX",
    "pytorchjob-tcp": "RANK",
    "mpijob-tcp-agents": "HOLDFAST_NODE_INDEX",
    "leaderworkerset-tcp": "HOLDFAST_NODE_INDEX",
    "jobset-tcp-no-agent": "PET_NODE_RANK",
    "jobset-tcp-no-agent-per-rank": "RANK",
    "trainjob-sriov-no-agent": "PET_NODE_RANK",
    "trainjob-tcp-no-agent-per-rank": "RANK",
    "pytorchjob-rdma-shared-no-agent": "PET_NODE_RANK",
}
"""Which variable tells a node its number, by case."""


def rendered(name: str, namespace: str, **place: Any) -> RunManifests:
    """A case in this namespace, under the case's own name."""
    case = CASES[name]
    job = {**case.job, "name": name[:30].rstrip("-")}
    return render(render_context(Case(job=job, target={**case.target, "namespace": namespace, **place})))


def create(lab: Lab, *renderings: RunManifests, judged_only: bool = False) -> str:
    """Have all of them made, or only judged, what must be there first before the rest; what kubectl says of the rest.

    Webhooks judge by copies, so what was just made is waited for until they know of it.
    """
    first = [each for rendering in renderings for each in rendering.prerequisites]
    if first:  # runs of a namespace share the list of quarantined machines
        lab.kubectl("apply", "-f", "-", input=to_yaml(first))
    rest = to_yaml([each for rendering in renderings for each in (rendering.owner, *rendering.owned)])
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            judged = lab.kubectl("create", "--dry-run=server", "-f", "-", input=rest)
            break
        except HoldfastError as error:
            if not first or "not found" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.2)
    return judged if judged_only else lab.kubectl("create", "-f", "-", input=rest)


def refused(lab: Lab, *words: str, text: str | None = None) -> str:
    """What kubectl says of something that is not done."""
    done = subprocess.run(
        lab.kubectl_command(*words), input=text, capture_output=True, text=True, check=False, timeout=WITHIN_S
    )
    assert done.returncode != 0, done.stdout
    return done.stderr


WITH_POD = {
    "trainjob-sriov-no-agent": POD,
    "pytorchjob-tcp": POD,
    "mpijob-tcp": {**POD, "env_from": {}},
}
"""Cases that get the target's `pod` of the case `jobset-pod`, so that every kind of object has it."""


def test_every_manifest_is_accepted(lab: Lab, namespace: str) -> None:
    install_kinds(lab)
    install_gateway_kinds(lab)
    more = {name: {"pod": WITH_POD[name]} if name in WITH_POD else {} for name in CASES}
    renderings = [rendered(name, namespace, **place) for name, place in more.items()]
    answer = create(lab, *renderings, judged_only=True)
    rest = [each for rendering in renderings for each in (rendering.owner, *rendering.owned)]
    assert answer.count("created (server dry run)") == len(rest)


def test_alerts_and_dashboards_are_accepted(lab: Lab, namespace: str) -> None:
    objects = monitoring_objects()
    answer = lab.kubectl("create", "-n", namespace, "--dry-run=server", "-f", "-", input=to_yaml(objects))
    assert answer.count("created (server dry run)") == len(objects)
    assert "prometheusrule" in answer


def test_trees_of_every_kind_show_no_difference_once_applied(lab: Lab, namespace: str) -> None:
    """Not even to what Kueue, which suspends these runs for lack of their queue, and the operators have set."""
    names = ("jobset-tcp-bare", "jobset-efa", "jobset-tcp-no-agent", "trainjob-tcp", "pytorchjob-tcp", "mpijob-tcp")
    names += ("mpijob-tcp-agents", "leaderworkerset-tcp")
    named = {name: CASES[name] for name in names} | {"gke-tcpxo": FABRIC_CASES["gke-tcpxo"]}
    cases = {
        name: Case(job={**case.job, "name": name}, target={**case.target, "namespace": namespace, "queue": "train"})
        for name, case in named.items()
    }
    text = "".join(render_tree(tree_context(case), b"code").text for case in cases.values())
    lab.kubectl("apply", "-f", "-", input=text)
    again = lab.kubectl("apply", "-f", "-", input=text).splitlines()
    assert [line for line in again if not line.endswith(" unchanged")] == []
    lab.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=text)


LEVELS = ("restricted", "baseline", "privileged")
LEVEL = {
    "jobset-pod": "restricted",
    "mpijob-tcp": "restricted",
    "jobset-tcp-bare": "baseline",
    "mpijob-rdma-shared": "privileged",
}
"""The strictest level of Pod Security that admits a case's pods; those of fabrics are in the page."""
CHANGED = {"jobset-tcp-bare": {"user": 0}, "jobset-pod": {"pod": {**POD, "runtime_class": None}}}
"""What is another target's: root, and a pod without a RuntimeClass, which must exist."""


def test_pod_security_admits_the_pods_of_each_fabric_at_the_level_that_the_page_names(lab: Lab, namespace: str) -> None:
    lab.kubectl("create", "-n", namespace, "serviceaccount", "trainers")
    page = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
    of_fabrics = {
        name: row["level"]
        for row in re.finditer(r"^\| (?P<fabrics>`.*`) \| `(?P<level>\w+)` \|", page, re.MULTILINE)
        if row["level"] in LEVELS
        for name in re.findall(r"[\w-]+", row["fabrics"])
    }
    assert of_fabrics.keys() == CATALOG.keys()
    cases = CASES | FABRIC_CASES
    more = {"namespace": namespace, "priority_class": None}
    asked = {
        name: render_context(
            Case(job={**case.job, "name": name}, target={**case.target, **more, **CHANGED.get(name, {})})
        )
        for name, case in cases.items()
        if name in {*LEVEL, *of_fabrics}
    }
    pods = {name: pods_of(ctx, render(ctx).objects) for name, ctx in asked.items()}
    found: dict[str, str] = {}
    for level in LEVELS:
        lab.kubectl("label", "namespace", namespace, f"pod-security.kubernetes.io/enforce={level}", "--overwrite")
        left = [pod for name in pods.keys() - found.keys() for pod in pods[name]]
        rejected = pods_that_pod_security_rejects(lab, left)
        for name in pods.keys() - found.keys():
            if not rejected & {pod["metadata"]["name"] for pod in pods[name]}:
                found[name] = level
    assert found == LEVEL | of_fabrics


def pods_that_pod_security_rejects(lab: Lab, pods: list[dict[str, Any]]) -> set[str]:
    """Names of the pods that a dry run does not admit."""
    command = lab.kubectl_command("create", "--dry-run=server", "-f", "-")
    done = subprocess.run(command, input=to_yaml(pods), capture_output=True, text=True, check=False, timeout=WITHIN_S)
    names = set(re.findall(r'pods "([^"]+)" is forbidden: violates PodSecurity', done.stderr))
    assert len(names) == len(done.stderr.splitlines()), done.stderr
    assert done.stdout.count("created") == len(pods) - len(names)
    return names


def test_patches_merge_by_the_keys_of_the_api_server_and_know_its_fields(lab: Lab) -> None:
    schemas = json.loads(lab.kubectl("get", "--raw", "/openapi/v3/api/v1"))["components"]["schemas"]
    pod, container = (schemas[f"io.k8s.api.core.v1.{kind}"]["properties"] for kind in ("PodSpec", "Container"))
    assert (set(pod), set(container)) == (POD_FIELDS, CONTAINER_FIELDS)
    lists = {("spec", name): field for name, field in pod.items()}
    for of in ("containers", "initContainers"):
        lists |= {("spec", of, name): field for name, field in container.items()}
    key = "x-kubernetes-patch-merge-key"
    merged = {fields: field[key] for fields, field in lists.items() if key in field}
    assert merged == {**MERGE_KEYS, ("spec", "ephemeralContainers"): "name"}


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("podReplacementPolicy:", "podReplacmentPolicy:", "podReplacmentPolicy"),
        ("name: jobset-tcp-000000\n", f"name: {'x' * 60}\n", "too long"),
    ],
)
def test_what_is_wrong_is_refused(lab: Lab, namespace: str, right: str, wrong: str, said: str) -> None:
    """So that the test above can fail."""
    text = rendered("jobset-tcp", namespace).text.replace(right, wrong)
    assert said in refused(lab, "create", "--dry-run=server", "-f", "-", text=text)


def nodes(lab: Lab, namespace: str, run: str, count: int) -> list[dict[str, Any]]:
    """The pods of a run's nodes as its operator made them, by name."""
    of_run = ("-n", namespace, "-l", f"holdfast/run={run},holdfast/part=node")
    deadline = time.monotonic() + WITHIN_S
    while True:
        found = json.loads(lab.kubectl("get", "pods", *of_run, "-o", "json"))["items"]
        if len(found) == count:
            return sorted(found, key=lambda pod: pod["metadata"]["name"])
        assert time.monotonic() < deadline, f"{run} has {len(found)} pods"


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    """A pod's variables, with the labels and annotations that some are taken from filled in."""
    variables: dict[str, Any] = {}
    for each in pod["spec"]["containers"][0]["env"]:
        path = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        kind, _, key = path.partition("['")
        home = {"metadata.labels": "labels", "metadata.annotations": "annotations"}.get(kind)
        variables[each["name"]] = pod["metadata"][home][key.removesuffix("']")] if home else each.get("value")
    return variables


def test_operators_tell_each_node_its_number_and_where_to_meet(lab: Lab, namespace: str) -> None:
    renderings = {name: rendered(name, namespace, queue=None) for name in NUMBERS}
    create(lab, *renderings.values())
    for name, number in NUMBERS.items():
        first, second = nodes(lab, namespace, renderings[name].objects[-1]["metadata"]["labels"]["holdfast/run"], 2)
        told = [environment(first), environment(second)]
        assert [each[number] for each in told] == ["0", "1"], name
        if "PET_NODE_RANK" in told[0]:
            assert [each["PET_NNODES"] for each in told] == ["2", "2"], name
        meeting = {each["MASTER_ADDR"] for each in told if "MASTER_ADDR" in each}
        spec = first["spec"]
        if "subdomain" in spec:
            assert meeting <= {f"{spec['hostname']}.{spec['subdomain']}"}, name
        else:
            assert meeting == {first["metadata"]["name"]}, name


def of_controller(lab: Lab, namespace: str, run: str, folder: Path) -> Path:
    """A kubeconfig for the account of a run's controller."""
    await_rights(lab, namespace, f"{run}-controller")
    document = json.loads(lab.kubeconfig.read_text())
    token = lab.kubectl("create", "token", f"{run}-controller", "-n", namespace).strip()
    document["users"][0]["user"] = {"token": token}
    document["contexts"][0]["context"]["namespace"] = namespace
    (folder / "kubeconfig").write_text(json.dumps(document))
    return folder / "kubeconfig"


def test_controllers_account_can_mark_the_first_pod_and_do_without_another(
    lab: Lab, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering = rendered("jobset-tcp-bare", namespace, queue=None)
    run = "jobset-tcp-bare-000000"
    create(lab, rendering)
    monkeypatch.setenv("KUBECONFIG", str(of_controller(lab, namespace, run, tmp_path)))
    for pod, later in (("one", False), ("one", False), ("another", True), ("another", True), ("one", False)):
        monkeypatch.setenv("HOSTNAME", pod)
        assert asyncio.run(had_earlier_controller(run)) == later
    own = ("get", "replicaset", f"{run}-controller", "-n", namespace, "-o", "jsonpath={.spec.replicas}")
    assert lab.kubectl(*own) == "1"
    asyncio.run(scale_to_zero(run))
    assert lab.kubectl(*own) == "0"


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob", "leaderworkerset"])
def test_controllers_account_can_say_that_a_run_failed_and_its_operator_takes_it_over(
    lab: Lab, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    name, here = f"{kind}-tcp-000000", ("-n", namespace)
    create(lab, rendered(f"{kind}-tcp", namespace, queue=None))
    nodes(lab, namespace, name, 2)
    monkeypatch.setenv("KUBECONFIG", str(of_controller(lab, namespace, name, tmp_path)))
    accepted = render_context(CASES[f"{kind}-tcp"]).accepted
    run = RunDir(tmp_path / name)
    backend = KubernetesBackend(folder=run, cluster=ClusterClient(namespace=namespace), accepted=accepted)
    asyncio.run(backend.report_outcome(Outcome.FAILED, 3, "rank 1 on node1 exited with code 3"))
    failed = "jsonpath={.status.conditions[?(@.type=='Failed')].message}"
    lab.kubectl("wait", kind, name, *here, "--for=condition=Failed", f"--timeout={WITHIN_S:g}s")
    said = lab.kubectl("get", kind, name, *here, "-o", failed)
    assert said == "rank 1 on node1 exited with code 3 (exit code 3)"


def test_controllers_account_may_do_what_it_must_and_nothing_else(lab: Lab, namespace: str) -> None:
    run = "jobset-tcp-000000"
    create(lab, rendered("jobset-tcp", namespace, queue=None))
    nodes(lab, namespace, run, 2)
    here = ("-n", namespace)
    account = f"--token={lab.kubectl('create', 'token', f'{run}-controller', *here).strip()}"

    def uid(job: str) -> str:
        return lab.kubectl("get", "job", job, *here, "--ignore-not-found", "-o", "jsonpath={.metadata.uid}")

    kept, lost = uid(f"{run}-node-0"), uid(f"{run}-node-1")
    assert f"{run}-node-0" in lab.kubectl(account, "get", "pods", *here)
    lab.kubectl(account, "delete", "job", f"{run}-node-1", *here, "--wait=false")
    deadline = time.monotonic() + WITHIN_S
    while uid(f"{run}-node-1") in {"", lost}:
        assert time.monotonic() < deadline
    for words in (
        ("get", "secrets", *here),
        ("get", "jobsets", *here),
        ("get", "events", *here),
        ("delete", "jobset", run, *here),
        ("get", "pods", "--all-namespaces"),
        ("delete", "replicaset", f"{run}-controller", *here),
        ("patch", "replicaset", f"{run}-controller", *here, "-p", '{"spec": {"minReadySeconds": 1}}'),
        ("scale", "replicaset", "another", *here, "--replicas=0"),
        ("get", "configmap", run, *here),
        ("delete", "jobset", "another", *here),
        ("create", "serviceaccount", "another", *here),
    ):
        assert "forbidden" in refused(lab, account, *words).lower(), words
    assert uid(f"{run}-node-0") == kept
