"""What docs/storage.md shows: its targets render, and the real API server accepts its objects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launch.kubernetes.golden_cases import Case, of_kind, render_context

from holdfast.findings import Severity
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.object_names import CHECKPOINT_ANNOTATION, NODE, PART_LABEL
from holdfast.launch.kubernetes.preflight.dry_run_pods import pods_of
from holdfast.launch.kubernetes.preflight.job_checks import check_job_on_cluster
from holdfast.launch.kubernetes.storage_catalog import CATALOG, find_driver
from lab import Lab
from lab.install import await_established
from lab.toolchain import OPERATORS, source_folder

PAGE = (Path(__file__).parents[3] / "docs" / "storage.md").read_text()
DOCUMENTS: list[dict[str, Any]] = [
    document
    for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for document in yaml.safe_load_all(block)
]
TARGETS = [each for each in DOCUMENTS if "apiVersion" not in each]
ACCOUNTS = [each for each in DOCUMENTS if each.get("kind") == "ServiceAccount"]
OBJECTS = [each for each in DOCUMENTS if "apiVersion" in each and each not in ACCOUNTS]
IDENTITY = next(each for each in TARGETS if "service_account" in each.get("pod", {}))

SNAPSHOTTER = "github.com/kubernetes-csi/external-snapshotter/client/v8@v8.7.0"
CHECKSUM = "h1:HVaSUeRRHPu49aSiL8eXOjS9Re9G6pM0NzdTGI7mM14="
"""That of Go's checksum database."""

# What the clouds' webhooks add to a pod: aws/amazon-eks-pod-identity-webhook, Azure/azure-workload-identity. GKE has no
# webhook: the metadata server of the machine gives tokens.
TOKENS: Mapping[str, tuple[str, str]] = {
    "eks.amazonaws.com/role-arn": ("sts.amazonaws.com", "/var/run/secrets/eks.amazonaws.com/serviceaccount"),
    "azure.workload.identity/client-id": ("api://AzureADTokenExchange", "/var/run/secrets/azure/tokens"),
}
"""By the annotation of the account: the token's audience, and where it is mounted."""


def ranks_pods(target: Mapping[str, Any], *, workload: str = "jobset", path: str = "s3://bucket/run") -> list[Any]:
    case = Case(job={"checkpoint": {"path": path, "local": "/nvme/checkpoints"}, "secrets": {}}, target=target)
    ctx = render_context(of_kind(case, workload))
    assert [each for each in check_job_on_cluster(ctx) if each.severity is Severity.ERROR] == []
    pods = pods_of(ctx, render(ctx).objects)
    return [pod for pod in pods if pod["metadata"]["labels"][PART_LABEL] == NODE]


@pytest.mark.parametrize("number", range(len(TARGETS)))
def test_target_of_the_page_renders(number: int) -> None:
    target = TARGETS[number]
    (pod,) = ranks_pods(target)
    (node,) = (each for each in pod["spec"]["containers"] if each["name"] == "node")
    mounted = {mount["mountPath"] for mount in node["volumeMounts"]}
    assert mounted >= {volume["mount"] for volume in target.get("pod", {}).get("volumes", ())}
    preferred = target.get("pod", {}).get("patch", {}).get("spec", {}).get("affinity", {}).get("nodeAffinity", {})
    assert pod["spec"].get("affinity", {}).get("nodeAffinity", {}) == preferred


def test_every_class_of_the_page_is_of_a_known_driver() -> None:
    assert {each["kind"] for each in OBJECTS} == {"StorageClass", "PersistentVolumeClaim", "VolumeSnapshot"}
    assert all(find_driver(each["provisioner"]) for each in OBJECTS if each["kind"] == "StorageClass")


@pytest.mark.parametrize("workload", ["jobset", "trainjob", "pytorchjob", "mpijob"])
@pytest.mark.parametrize("path", ["s3://bucket/run", "gs://bucket/run", "az://container/run"])
def test_ranks_that_use_a_store_have_the_account_and_no_token_of_the_api_server(workload: str, path: str) -> None:
    for pod in ranks_pods(IDENTITY, workload=workload, path=path):
        assert pod["spec"]["serviceAccountName"] == "trainers"
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["fsGroup"] == 1000, "it may read the token of the cloud"
        assert pod["metadata"]["annotations"][CHECKPOINT_ANNOTATION] == path
        assert pod["metadata"]["labels"]["azure.workload.identity/use"] == "true"


@pytest.mark.parametrize("driver", CATALOG.values(), ids=lambda row: row.name)
def test_driver_is_found_by_each_of_its_names(driver: Any) -> None:
    names = [f"a{driver.provisioner}" if driver.provisioner[0] == "." else driver.provisioner, driver.former]
    assert all(find_driver(name) is driver for name in names if name)
    assert driver.source.startswith("https://")
    assert driver.advice.endswith(".")
    assert find_driver(f"{driver.provisioner}.example") is None


def with_token(pod: dict[str, Any], account: Mapping[str, Any]) -> dict[str, Any]:
    """A pod as the cloud's webhook changes it."""
    changed = json.loads(json.dumps(pod))
    for annotation in account["metadata"]["annotations"].keys() & TOKENS.keys():
        audience, folder = TOKENS[annotation]
        token = {"audience": audience, "expirationSeconds": 3600, "path": "token"}
        changed["spec"]["volumes"].append({"name": "cloud", "projected": {"sources": [{"serviceAccountToken": token}]}})
        for container in changed["spec"]["containers"]:
            container["volumeMounts"].append({"name": "cloud", "mountPath": folder, "readOnly": True})
    return changed


@pytest.mark.slow
def test_pods_with_the_token_of_each_cloud_are_admitted_without_that_of_the_api_server(
    lab: Lab, namespace: str
) -> None:
    lab.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    (pod,) = ranks_pods({**IDENTITY, "namespace": namespace})
    for account in ACCOUNTS:
        here = {**account, "metadata": {**account["metadata"], "namespace": namespace}}
        lab.kubectl("apply", "-f", "-", input=json.dumps(here))
        sent = with_token(pod, account)
        command = ("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-")
        seen = json.loads(lab.kubectl(*command, input=json.dumps(sent)))
        volumes = [each["name"] for each in seen["spec"]["volumes"]]
        assert volumes == [each["name"] for each in sent["spec"]["volumes"]], "the API server adds its own token to it"
    assert len(ACCOUNTS) == 3


@pytest.mark.slow
def test_api_server_accepts_the_objects_of_the_page(lab: Lab, namespace: str) -> None:
    crds = source_folder(OPERATORS, SNAPSHOTTER, checksum=CHECKSUM) / "config" / "crd"
    lab.kubectl("apply", "--server-side", "-f", crds / "snapshot.storage.k8s.io_volumesnapshots.yaml")
    await_established(lab.client(), ("volumesnapshots.snapshot.storage.k8s.io",))
    text = yaml.safe_dump_all(OBJECTS).replace("namespace: ml", f"namespace: {namespace}")
    answer = lab.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input=text)
    assert answer.count("created (server dry run)") == len(OBJECTS) >= 4
