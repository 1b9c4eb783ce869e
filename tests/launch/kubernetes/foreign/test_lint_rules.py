"""Each rule: a manifest with one mistake has that finding alone, and its patch removes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import yaml
from tests.launch.kubernetes.foreign.manifests import GONE, WORKLOADS, manifest

from holdfast.diagnose.knowledge.manifest_findings import ROWS
from holdfast.findings import Severity
from holdfast.launch.kubernetes.foreign.foreign_kinds import read_workload
from holdfast.launch.kubernetes.foreign.json_patch import apply
from holdfast.launch.kubernetes.foreign.lint import RULES, ManifestFinding, combined_patch, lint_manifest
from holdfast.launch.kubernetes.foreign.manifest_source import ManifestObject

ENV = "POD.containers.0.env"
ONE = "POD.containers.0"
LAUNCHER = "spec.mpiReplicaSpecs.Launcher.template.spec.containers.0"
HOST_NETWORK = {"POD.hostNetwork": True, "POD.dnsPolicy": "ClusterFirstWithHostNet"}


@dataclass(frozen=True)
class Case:
    """A change of a manifest without mistakes, and the code of the finding that follows."""

    code: str
    kind: str
    changes: dict[str, Any]
    severity: Severity = Severity.WARNING

    def __str__(self) -> str:
        return f"{self.code.removeprefix('manifest-')} {self.kind} {' '.join(self.changes)}"


def env(**values: object) -> list[dict[str, object]]:
    return [{"name": name, "value": value} for name, value in ({"NCCL_NET": "IB"} | values).items()]


def limits(**amounts: object) -> dict[str, object]:
    return {name.replace("__", "/").replace("_", "."): amount for name, amount in amounts.items()}


NO_SHM = {f"{ONE}.volumeMounts": [{"name": "data", "mountPath": "/data"}]}
NO_CLAIM = {f"{ONE}.volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}
ERROR = Severity.ERROR
CASES = [
    *(
        Case("manifest-shm-default", kind, NO_SHM, ERROR)
        for kind in WORKLOADS
        if kind not in {"TrainJob", "StatefulSet"}
    ),
    Case(
        "manifest-shm-default",
        "Job",
        NO_SHM
        | {f"{ONE}.resources.limits": limits(nvidia_com__gpu=1, rdma__ib=1), f"{ONE}.command": ["torchrun", "x.py"]},
    ),
    Case("manifest-shm-on-disk", "PyTorchJob", {"POD.volumes.0": {"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}}}),
    Case("manifest-shm-on-disk", "PyTorchJob", {"POD.volumes.0": {"name": "shm", "emptyDir": None}}),
    Case("manifest-socket-interface", "PyTorchJob", {ENV: env(NCCL_SOCKET_IFNAME="ib0")}, ERROR),
    Case("manifest-socket-interface", "JobSet", {ENV: env(NCCL_SOCKET_IFNAME="=ens5,ens6")}, ERROR),
    Case("manifest-socket-interface", "JobSet", {ENV: env(NCCL_SOCKET_IFNAME="^eth")}, ERROR),
    Case("manifest-socket-interface", "JobSet", {ENV: env(GLOO_SOCKET_IFNAME="eth1")}, ERROR),
    Case("manifest-socket-interface", "JobSet", HOST_NETWORK | {ENV: env(NCCL_SOCKET_IFNAME="lo")}, ERROR),
    Case(
        "manifest-socket-interface",
        "Job",
        {f"{ONE}.command": ["sh", "-c", "export NCCL_SOCKET_IFNAME=bond0; torchrun x.py"]},
        ERROR,
    ),
    Case(
        "manifest-socket-interface",
        "MPIJob",
        {f"{LAUNCHER}.command": ["mpirun", "-x", "NCCL_SOCKET_IFNAME=ib0", "-x", "NCCL_NET", "x"]},
        ERROR,
    ),
    *(
        Case("manifest-no-checkpoint", kind, NO_CLAIM)
        for kind in ("PyTorchJob", "MPIJob", "JobSet", "Volcano", "TrainingRuntime")
    ),
    Case(
        "manifest-no-checkpoint",
        "JobSet",
        {f"{ONE}.volumeMounts.1": {"name": "data", "mountPath": "/data", "readOnly": True}},
    ),
    Case("manifest-no-checkpoint", "JobSet", {"POD.volumes.1": {"name": "data", "hostPath": {"path": "/mnt"}}}),
    *(
        Case("manifest-tcp-fallback", kind, {ENV: []})
        for kind in ("PyTorchJob", "JobSet", "Volcano", "TrainingRuntime")
    ),
    Case("manifest-tcp-fallback", "TrainJob", {"spec.trainer.env": GONE}),
    Case(
        "manifest-tcp-fallback",
        "MPIJob",
        {f"{LAUNCHER}.env": [], f"{LAUNCHER}.command": ["mpirun", "python", "train.py"]},
    ),
    Case(
        "manifest-tcp-fallback",
        "PyTorchJob",
        {ENV: [], f"{ONE}.resources.limits": {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}},
    ),
    Case("manifest-tcp-only", "PyTorchJob", {ENV: [], f"{ONE}.resources.limits": {"nvidia.com/gpu": 8}}, Severity.INFO),
    Case("manifest-no-topology", "Volcano", {"spec.networkTopology": GONE, "spec.tasks.0.template.metadata": {}}),
    Case("manifest-no-topology", "PyTorchJob", {"spec.pytorchReplicaSpecs.Worker.template.metadata": {}}),
    Case(
        "manifest-no-topology",
        "JobSet",
        {
            "metadata": {"name": "llama"},
            "POD.schedulerName": "kai",
            "spec.replicatedJobs.0.template.spec.template.metadata": GONE,
        },
    ),
    Case("manifest-restart-budget", "PyTorchJob", {"spec.runPolicy": GONE}),
    Case("manifest-restart-budget", "MPIJob", {"spec.runPolicy": {"backoffLimit": 0}}),
    Case("manifest-restart-budget", "JobSet", {"spec.failurePolicy": GONE}),
    Case("manifest-restart-budget", "TrainingRuntime", {"spec.template.spec.failurePolicy": {"maxRestarts": 0}}),
    Case(
        "manifest-restart-budget", "Volcano", {"spec.policies": [{"event": "TaskCompleted", "action": "CompleteJob"}]}
    ),
    Case("manifest-mpi-environment", "MPIJob", {f"{LAUNCHER}.env": env(HF_HOME="/data/hf")}),
    Case("manifest-mpi-environment", "MPIJob", {f"{LAUNCHER}.env": env(NCCL_DEBUG="INFO")}, ERROR),
    Case("manifest-mpi-environment", "MPIJob", {ENV: [{"name": "NCCL_DEBUG", "value": "INFO"}]}, ERROR),
    Case(
        "manifest-mpi-environment",
        "MPIJob",
        {
            f"{LAUNCHER}.env": env(SEED="1"),
            f"{LAUNCHER}.command": ["bash", "-c", "mpirun -x NCCL_NET \\\n python train.py"],
        },
    ),
    Case("manifest-rdma-rights", "PyTorchJob", {f"{ONE}.securityContext": GONE}),
    Case("manifest-rdma-rights", "JobSet", {f"{ONE}.securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}),
    Case(
        "manifest-rdma-rights",
        "JobSet",
        {
            f"{ONE}.resources.limits": {"nvidia.com/gpu": 8},
            f"{ONE}.volumeMounts.1": {"name": "data", "mountPath": "/dev/infiniband"},
        },
        ERROR,
    ),
    Case("manifest-rdma-disabled", "PyTorchJob", {ENV: env(NCCL_IB_DISABLE="1")}),
    Case("manifest-rdma-disabled", "JobSet", {ENV: [*env(), {"name": "NCCL_IB_DISABLE", "value": "1"}]}),
    Case("manifest-no-gang", "PyTorchJob", {"metadata": {"name": "llama"}}),
    Case("manifest-no-gang", "TrainJob", {"metadata.labels": {"app": "llama"}}),
    Case("manifest-no-gang", "Volcano", {"spec.minAvailable": 1}),
    Case("manifest-lone-restart", "JobSet", {"spec.replicatedJobs.0.template.spec.backoffLimit": GONE}),
    Case("manifest-lone-restart", "JobSet", {"POD.restartPolicy": "OnFailure"}),
    Case("manifest-lone-restart", "TrainingRuntime", {"POD.restartPolicy": GONE}),
    Case("manifest-never-ends", "StatefulSet", {}),
    Case("manifest-rank-count", "PyTorchJob", {f"{ONE}.command": ["torchrun", "--nnodes=4", "x.py"]}, ERROR),
    Case("manifest-rank-count", "JobSet", {f"{ONE}.command": ["torchrun", "--nproc-per-node", "16", "x.py"]}, ERROR),
    Case("manifest-rank-count", "Job", {f"{ONE}.command": ["sh", "-c", "torchrun --nnodes 3 x.py"]}, ERROR),
    Case("manifest-rank-count", "MPIJob", {"spec.slotsPerWorker": 4}, ERROR),
    Case("manifest-env-not-text", "PyTorchJob", {ENV: env(OMP_NUM_THREADS=8)}, ERROR),
    Case("manifest-env-not-text", "JobSet", {ENV: env(DEBUG=True)}, ERROR),
    Case("manifest-env-not-text", "TrainJob", {"spec.trainer.env": env(LR=1e-4)}, ERROR),
    Case(
        "manifest-request-without-limit",
        "Job",
        {f"{ONE}.resources.requests": {"cpu": 8, "hugepages-2Mi": "5Gi"}},
        ERROR,
    ),
    Case("manifest-request-without-limit", "Job", {f"{ONE}.resources.requests": {"nvidia.com/gpu": 4}}, ERROR),
    Case("manifest-container-name", "PyTorchJob", {f"{ONE}.name": "trainer"}, ERROR),
    Case("manifest-reserved-variable", "PyTorchJob", {ENV: env(MASTER_ADDR="llama-worker-0", RANK="0")}),
    Case("manifest-reserved-variable", "TrainJob", {"spec.trainer.env": env(PET_NNODES="2")}, ERROR),
    Case("manifest-host-network-dns", "PyTorchJob", {"POD.hostNetwork": True}, ERROR),
]
"""For each rule at least one; `manifest-ordered-start` has a test of its own."""


def codes(data: dict[str, Any]) -> dict[str, ManifestFinding]:
    return {
        finding.code: finding
        for finding in lint_manifest(yaml.safe_dump(data), "m.yaml").findings
        if isinstance(finding, ManifestFinding)
    }


def patched(data: dict[str, Any], finding: ManifestFinding) -> dict[str, Any]:
    """The manifest after a finding's patch, by RFC 6902 and nothing of holdfast's."""
    data = json.loads(json.dumps(data))
    for operation in json.loads(msgspec.json.encode(finding.patch)):
        *parents, last = [key.replace("~1", "/").replace("~0", "~") for key in operation["path"].split("/")[1:]]
        here: Any = data
        for key in parents:
            here = here[int(key)] if isinstance(here, list) else here[key]
        if operation["op"] == "remove":
            del here[int(last) if isinstance(here, list) else last]
        elif isinstance(here, dict):
            assert operation["op"] == "add" or last in here
            here[last] = operation["value"]
        elif operation["op"] == "replace":
            here[int(last)] = operation["value"]
        else:
            here.insert(len(here) if last == "-" else int(last), operation["value"])
    return data


@pytest.mark.parametrize("kind", [kind for kind in WORKLOADS if kind != "StatefulSet"])
def test_manifest_without_a_mistake_has_no_finding(kind: str) -> None:
    linted = lint_manifest(yaml.safe_dump(manifest(kind)), "m.yaml")
    assert linted.findings == ()
    assert [workload.nodes for workload in linted.workloads] == [2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mistake_is_found_alone_and_its_patch_removes_it(case: Case) -> None:
    bad = manifest(case.kind, case.changes)
    found = codes(bad)
    assert set(found) == {case.code}
    finding = found[case.code]
    assert finding.severity is case.severity
    assert finding.where.startswith("m.yaml:")
    assert finding.remedy
    assert set(codes(patched(bad, finding))) - {"manifest-reserved-variable"} == set()


def test_ordered_start_is_found_in_a_statefulset() -> None:
    bad = manifest("StatefulSet", {"spec.podManagementPolicy": GONE})
    found = codes(bad)
    assert set(found) == {"manifest-never-ends", "manifest-ordered-start"}
    assert set(codes(patched(bad, found["manifest-ordered-start"]))) == {"manifest-never-ends"}
    assert codes(patched(bad, found["manifest-never-ends"])) == {}


def test_each_code_has_a_case_and_an_explanation() -> None:
    others = {"manifest-ordered-start", "manifest-not-checked", "not-a-job-file"}
    assert {case.code for case in CASES} | others == {row[0] for row in ROWS}
    assert len(RULES) >= 18


WORST = {
    "metadata": {"name": "llama"},
    "POD.volumes": [],
    f"{ONE}.volumeMounts": [],
    f"{ONE}.securityContext": GONE,
    "POD.hostNetwork": True,
    "POD.containers.0.env": [{"name": "NCCL_SOCKET_IFNAME", "value": "lo"}, {"name": "A", "value": 1}],
}


@pytest.mark.parametrize("kind", [kind for kind in WORKLOADS if kind != "TrainJob"])
def test_combined_patch_removes_all_findings(kind: str) -> None:
    data = manifest(kind, WORST)
    target = ManifestObject(file="m.yaml", data=data, locations={})
    workload = read_workload(target)
    assert workload is not None
    assert len(codes(data)) >= 5
    assert codes(apply(combined_patch(workload), target).data) == {}
