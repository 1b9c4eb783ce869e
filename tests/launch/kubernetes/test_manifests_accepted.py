"""Manifests before the real API server, with the real operators and their webhooks behind it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.launch.kubernetes.golden_cases import CASES, Case, render_context
from tests.launch.kubernetes.test_collect_inventory import await_rights

from holdfast.errors import HoldfastError
from holdfast.events import Outcome
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.incluster.controller_identity import had_earlier_controller, scale_to_zero
from holdfast.launch.kubernetes.incluster.kubernetes_backend import KubernetesBackend
from holdfast.launch.kubernetes.manifests.run_manifests import RunManifests, render
from holdfast.launch.kubernetes.manifests.yaml_writer import to_yaml
from holdfast.run_dir import RunDir
from lab import Lab

pytestmark = pytest.mark.slow

WITHIN_S = 240.0
NUMBERS = {
    "jobset-tcp": "HOLDFAST_NODE_INDEX",
    "trainjob-tcp": "HOLDFAST_NODE_INDEX",
    "pytorchjob-tcp": "RANK",
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


def test_every_manifest_is_accepted(lab: Lab, namespace: str) -> None:
    renderings = [rendered(name, namespace) for name in CASES]
    answer = create(lab, *renderings, judged_only=True)
    rest = [each for rendering in renderings for each in (rendering.owner, *rendering.owned)]
    assert answer.count("created (server dry run)") == len(rest)


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


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
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
