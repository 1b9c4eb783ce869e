"""The target file that `target init` writes, from objects as the API server gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.fabric.catalog import NAMES
from holdfast.job.targets import TargetSpec, Workload, read_target
from holdfast.launch.kubernetes.init.cluster_survey import ClusterSurvey
from holdfast.launch.kubernetes.init.target_draft import target_text

RACK, BLOCK = "cloud.provider.com/topology-rack", "cloud.provider.com/topology-block"


def node(allocatable: Mapping[str, int] = {}, /, provider: str = "", taints: Sequence[str] = (), **labels: str) -> Any:
    return {
        "metadata": {"name": "m", "labels": {key.replace("__", "/"): value for key, value in labels.items()}},
        "spec": {"providerID": provider, "taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {"allocatable": {"cpu": "64", **{name: str(amount) for name, amount in allocatable.items()}}},
    }


def named(*names: str, **spec: Any) -> list[Any]:
    return [{"metadata": {"name": name, "namespace": "kube-system"}, "spec": spec} for name in names]


def survey(**seen: Any) -> ClusterSurvey:
    return ClusterSurvey(**{"context": "lab", "namespace": "ml", "workloads": [*Workload]} | seen)


def drafted(tmp_path: Path, **seen: Any) -> tuple[TargetSpec, str]:
    text = target_text("cluster", survey(**seen))
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    for line in text.splitlines():
        assert "# " in line
    return read_target(path, fabrics=NAMES), text


def test_what_a_cluster_shows_once_is_written(tmp_path: Path) -> None:
    machines = [
        node({"nvidia.com/gpu": 8}, taints=["nvidia.com/gpu"], **{RACK: f"r{number}", BLOCK: "b0"}) for number in (0, 1)
    ]
    topology = [{"metadata": {"name": "t"}, "spec": {"levels": [{"nodeLabel": label} for label in (BLOCK, RACK)]}}]
    spec, text = drafted(
        tmp_path,
        context="arn:aws:eks:us-east-1:1:cluster/a b",
        local_queues=named("train"),
        claims=[*named("own", accessModes=["ReadWriteOnce"]), *named("1e3", accessModes=["ReadWriteMany"])],
        nodes=[*machines, node()],
        topologies=topology,
    )
    assert spec == TargetSpec.model_validate(
        {
            "kind": "kubernetes",
            "context": "arn:aws:eks:us-east-1:1:cluster/a b",
            "namespace": "ml",
            "workload": "jobset",
            "queue": "train",
            "volume": {"claim": "1e3"},
            "gpu_resource": "nvidia.com/gpu",
            "tolerations": [{"key": "nvidia.com/gpu"}],
            "topology_levels": {"block": BLOCK, "rack": RACK},
        }
    )
    assert "2 of 3 machines have 8 each" in text
    assert "a level of Topology t, 2 on 3 machines" in text


def test_what_a_cluster_has_several_times_or_does_not_show_is_a_comment(tmp_path: Path) -> None:
    plain = TargetSpec.model_validate({"kind": "kubernetes", "context": "lab", "namespace": "ml", "workload": "jobset"})
    several, text = drafted(
        tmp_path, local_queues=named("a", "b"), claims=named("c", "d", accessModes=["ReadWriteMany"])
    )
    assert several == plain
    assert "# LocalQueues here: a, b; name one" in text
    assert "# ReadWriteMany claims here: c, d; name one" in text
    hidden, text = drafted(tmp_path, local_queues=None, claims=None, nodes=None, topologies=None, networks=None)
    assert hidden == plain
    assert text.count("this user may not list") == 5


def test_class_for_a_volume_of_many_machines_is_suggested(tmp_path: Path) -> None:
    provisioners = {
        "gp3": "ebs.csi.aws.com",
        "lustre": "fsx.csi.aws.com",
        "own": "example.com/x",
        "efs": "efs.csi.aws.com",
    }
    classes = [{"metadata": {"name": name}, "provisioner": by} for name, by in provisioners.items()]
    _, text = drafted(tmp_path, storage_classes=classes)
    assert "`size: 1TiB` creates one, with `storage_class` lustre (FSx for Lustre) or efs (EFS)" in text
    _, text = drafted(tmp_path, storage_classes=classes[:1])
    assert text.rstrip().count("`size: 1TiB` creates one\n") == 1


def test_npus_are_the_resource_of_a_target(tmp_path: Path) -> None:
    spec, _ = drafted(tmp_path, nodes=[node({"huawei.com/Ascend910": 8, "huawei.com/Ascend910-memory": 64})])
    assert spec.gpu_resource == "huawei.com/Ascend910"


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ([Workload.TRAINJOB, Workload.MPIJOB], "trainjob"),
        ([Workload.LEADERWORKERSET], "leaderworkerset"),
        ([], "jobset"),
    ],
)
def test_workload_is_one_whose_operator_is_installed(tmp_path: Path, served: list[Workload], expected: str) -> None:
    spec, _ = drafted(tmp_path, workloads=served)
    assert (spec.workload, spec.agent) == (expected, True)


@pytest.mark.parametrize(
    ("seen", "fabric", "device"),
    [
        ({"nodes": [node({"rdma/hca_shared_devices_a": 63})]}, "rdma-shared", {}),
        (
            {"nodes": [node({"rdma/hca_shared_devices_a": 63}, provider="azure:///subscriptions/1")]},
            "aks-infiniband",
            {},
        ),
        ({"nodes": [node({"vpc.amazonaws.com/efa": 32}, provider="aws:///us-east-1a/i-0")]}, "efa-p5", {}),
        ({"nodes": [node({"vpc.amazonaws.com/efa": 2}, provider="aws:///us-east-1a/i-0")]}, "efa", {"per_node": 2}),
        ({"nodes": [node({"rdma/ib": 1}, node__coreweave__cloud="x")]}, "rdma-shared", {"resource": "rdma/ib"}),
        ({"nodes": [node({"rdma/ib": 1}, **{"node.coreweave.cloud/class": "gpu"})]}, "coreweave", {}),
        (
            {"nodes": [node({"nvidia.com/hostdev": 8})], "networks": named("rail")},
            "host-device",
            {"network": "rail"},
        ),
        ({"nodes": [node({"nvidia.com/hostdev": 8})], "networks": named("rail", "other")}, "host-device", {}),
        (
            {"nodes": [node(provider="gce://p/z/n")], "daemon_sets": named("nccl-rdma-installer", "other")},
            "gke-rdma",
            {},
        ),
        ({"nodes": [node(provider="ocid1.instance.oc1")], "device_classes": named("dra.net")}, "oke-dranet", {}),
        ({"nodes": [node()], "device_classes": named("dra.net")}, None, {}),
        ({"nodes": [node({"nvidia.com/hostdev": 8, "rdma/hca_shared_devices_a": 63})]}, None, {}),
        ({"nodes": [node({"nvidia.com/mlnxnics": 8})]}, None, {}),
        ({"nodes": [node({"nvidia.com/gpu": 0})]}, None, {}),
    ],
)
def test_fabric_is_the_one_whose_devices_machines_offer(
    tmp_path: Path, seen: Mapping[str, Any], fabric: str | None, device: Mapping[str, object]
) -> None:
    spec, text = drafted(tmp_path, **seen)
    assert spec.fabric == fabric, text
    assert spec.fabric_device.model_dump(exclude_unset=True) == device


def test_fabric_that_is_not_chosen_is_explained(tmp_path: Path) -> None:
    _, text = drafted(tmp_path, nodes=[node({"nvidia.com/hostdev": 8, "rdma/hca_shared_devices_a": 63})])
    assert "rdma-shared: 1 of 1 machines have 63 each of rdma/hca_shared_devices_a; host-device: 1 of 1" in text
    _, text = drafted(tmp_path, nodes=[node({"nvidia.com/mlnxnics": 8})], device_classes=named("nic"))
    assert "machines offer nvidia.com/mlnxnics, DeviceClass nic" in text


EFA, GPU, SLICE = "vpc.amazonaws.com/efa", "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
AWS = "aws:///us-east-1a/i-0"


def test_number_of_devices_that_differs_among_machines_is_a_comment(tmp_path: Path) -> None:
    spec, text = drafted(tmp_path, nodes=[node({EFA: amount, GPU: 8}, provider=AWS) for amount in (4, 32, 1)])
    assert (spec.fabric, spec.fabric_device.per_node) == ("efa", None)
    seen = f"3 of 3 machines with {GPU} have 1, 4 or 32 each of {EFA}; name one number"
    (line,) = (each for each in text.splitlines() if "fabric_device" in each)
    assert line.startswith("# fabric_device: {per_node: NUMBER}")
    assert seen in line


def test_taints_and_devices_are_those_of_the_machines_with_the_chosen_gpu(tmp_path: Path) -> None:
    big = node({GPU: 8, EFA: 32}, provider=AWS, taints=[GPU])
    small = node({SLICE: 7, EFA: 1}, provider=AWS, taints=["slices"])
    spec, text = drafted(tmp_path, nodes=[small, big, big, node({EFA: 1}, provider=AWS)])
    assert (spec.gpu_resource, [each.key for each in spec.tolerations], spec.fabric) == (GPU, [GPU], "efa-p5")
    assert "2 of 4 machines have 8 each; chosen, as no other GPU is on more machines; 1 of 4 machines have 7" in text
