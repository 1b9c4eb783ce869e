"""The runs whose manifests are golden files, by file name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace
from tests.job.loading import make_job

from holdfast.fabric.catalog import CATALOG, NAMES
from holdfast.job.run_spec import CodeArchive, RunSpec
from holdfast.job.targets import TargetSpec
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.object_names import PLACEHOLDER_ID, VOLUME_ROOT, ObjectNames

JOB: Mapping[str, Any] = {
    "name": "llama",
    "image": "registry.example/train:1",
    "command": ["python", "train.py"],
    "nodes": 2,
    "gpus_per_node": 8,
    "resources": {"cpu": 96, "memory": "1TiB", "shm": "64GiB"},
    "checkpoint": {"path": "checkpoints", "every_steps": 100},
    "secrets": {"HF_TOKEN": {"env": "HF_TOKEN"}},
    "recovery": {"max_restarts": 5},
}
TARGET: Mapping[str, Any] = {
    "kind": "kubernetes",
    "namespace": "ml",
    "queue": "train",
    "volume": {"claim": "checkpoints"},
}
TORCHRUN: Mapping[str, Any] = {"launch": "per-node", "command": ["torchrun", "train.py", "--note", "$(HOME)"]}

MPIRUN: Mapping[str, Any] = {"launch": "mpi", "command": ["mpirun", "python", "train.py"], "env": {"LEVEL": "2"}}

POD: Mapping[str, Any] = {
    "labels": {"team": "ml"},
    "annotations": {"sidecar.istio.io/inject": "false"},
    "pull_policy": "Always",
    "service_account": "trainers",
    "runtime_class": "nvidia",
    "scheduler": "bin-packing",
    "resource_claims": [{"name": "imex", "template": "imex-channel"}],
    "volumes": [
        {"name": "data", "mount": "/data", "read_only": True, "claim": "datasets"},
        {"name": "ca", "mount": "/etc/ssl/team", "secret": "team-ca"},
        {"name": "config", "mount": "/etc/team", "config_map": "team"},
        {"name": "nvme", "mount": "/nvme", "ephemeral": {"size": "1TiB", "storage_class": "local"}},
        {"name": "tokenizer", "mount": "/tokenizer", "image": "registry.example/tokenizer:1"},
    ],
    "env_from": {"config_maps": ["proxy"], "secrets": ["object-store"]},
    "ephemeral_storage": "200GiB",
    "patch": {
        "metadata": {"annotations": {"team.example/cost-centre": "42"}},
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "topologySpreadConstraints": [
                {
                    "topologyKey": "topology.kubernetes.io/zone",
                    "maxSkew": 1,
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {"team": "ml"}},
                }
            ],
            "initContainers": [
                {
                    "name": "shipper",
                    "image": "registry.example/shipper:1",
                    "restartPolicy": "Always",
                    "volumeMounts": [{"name": "spool", "mountPath": "/spool"}],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
            "containers": [
                {
                    "name": "node",
                    "env": [{"name": "SPOOL", "value": "/spool"}],
                    "ports": [{"name": "metrics", "containerPort": 9400}],
                    "volumeMounts": [{"name": "spool", "mountPath": "/spool"}],
                }
            ],
            "volumes": [{"name": "spool", "emptyDir": {"sizeLimit": "1Gi"}}],
        },
    },
}
"""A target's `pod` with every field, except for a hostPath, which Pod Security's `restricted` refuses."""


class Case(Struct, frozen=True, kw_only=True):
    """Differences from the plain job and target."""

    job: Mapping[str, Any] = field(default_factory=dict[str, Any])
    target: Mapping[str, Any] = field(default_factory=dict[str, Any])


CASES: Mapping[str, Case] = {
    "jobset-tcp": Case(),
    "jobset-tcp-bare": Case(
        job={"secrets": {}, "resources": {}, "gpus_per_node": 0, "recovery": {}},
        target={"queue": None, "volume": None},
    ),
    "jobset-rdma-shared": Case(
        job={"fabric": "rdma-shared"},
        target={
            "priority_class": "training",
            "node_selector": {"node-group": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu"}, {"key": "team", "value": "ml", "effect": "NoSchedule"}],
            "image_pull_secrets": ["registry"],
            "user": 0,
            "controller": {
                "image": "registry.example/holdfast:1",
                "cpu": 2,
                "cpu_limit": 4,
                "memory": "1GiB",
                "memory_limit": "2GiB",
                "node_selector": {"node-group": "system"},
                "tolerations": [{"key": "CriticalAddonsOnly"}],
            },
        },
    ),
    "trainjob-placement": Case(
        job={
            "nodes": 8,
            "priority": "urgent",
            "placement": {"level": "rack", "slices": {"level": "nvidia.com/gpu.clique", "nodes": 4}},
        },
        target={"workload": "trainjob", "topology_levels": {"rack": "cloud.provider.com/topology-rack"}},
    ),
    "jobset-sriov": Case(
        job={"fabric": "sriov"},
        target={"fabric_device": {"resource": "nvidia.com/rdma-vf", "per_node": 8, "network": "rdma/rail"}},
    ),
    "jobset-oke-roce": Case(
        job={"fabric": "oke-roce"}, target={"volume": {"claim": "made", "size": "10TiB", "storage_class": "fss"}}
    ),
    "jobset-infiniband": Case(job={"fabric": "infiniband"}, target={"fabric_device": {"resource": "rdma/ib"}}),
    "jobset-efa": Case(job={"fabric": "efa"}, target={"fabric_device": {"per_node": 32}}),
    "jobset-tcp-no-agent": Case(job=TORCHRUN, target={"agent": False}),
    "trainjob-tcp": Case(target={"workload": "trainjob"}),
    "trainjob-sriov-no-agent": Case(
        job={**TORCHRUN, "fabric": "sriov"},
        target={
            "workload": "trainjob",
            "agent": False,
            "fabric_device": {"resource": "nvidia.com/rdma-vf", "per_node": 8, "network": "rdma/rail"},
        },
    ),
    "trainjob-tcp-no-agent-per-rank": Case(job={"gpus_per_node": 1}, target={"workload": "trainjob", "agent": False}),
    "pytorchjob-tcp": Case(target={"workload": "pytorchjob"}),
    "pytorchjob-rdma-shared-no-agent": Case(
        job={**TORCHRUN, "fabric": "rdma-shared"}, target={"workload": "pytorchjob", "agent": False}
    ),
    "pytorchjob-tcp-one-node": Case(job={"nodes": 1}, target={"workload": "pytorchjob"}),
    "mpijob-tcp": Case(job=MPIRUN, target={"agent": False}),
    "mpijob-rdma-shared": Case(job={**MPIRUN, "fabric": "rdma-shared"}, target={"agent": False, "user": 0}),
    "mpijob-tcp-agents": Case(job=MPIRUN, target={"workload": "mpijob"}),
    "leaderworkerset-tcp": Case(target={"workload": "leaderworkerset"}),
    "jobset-tcp-mpi": Case(job=MPIRUN),
    "jobset-pod": Case(target={"pod": POD, "ttl_s": 3600}),
    "jobset-pod-group": Case(target={"pod_group": True, "queue": None}),
    "jobset-pod-group-volcano": Case(
        target={"pod_group": "volcano", "volcano_queue": "team", "queue": None, "priority_class": "high"}
    ),
    "jobset-multikueue": Case(target={"multikueue": {"west": "west-admin"}}),
    "jobset-placement-volcano": Case(
        job={"placement": {"level": "rack", "mode": "required"}},
        target={
            "pod_group": "volcano",
            "queue": None,
            "topology_levels": {"rack": "cloud.provider.com/topology-rack"},
        },
    ),
    "jobset-pod-monitor": Case(target={"pod_monitor": True}),
    "jobset-gateway": Case(
        target={"controller": {"gateway": {"name": "runs", "namespace": "gateways", "host": "runs.example"}}}
    ),
    "jobset-egress": Case(
        target={
            "egress": [
                {"cidr": "10.20.0.0/16"},
                {"namespace": "storage", "pods": {"app": "minio"}, "ports": [9000, 9001]},
                {"namespace": "monitoring", "ports": [8125], "protocol": "UDP"},
                {"pods": {"app": "proxy"}},
                {"ports": [443]},
            ]
        }
    ),
    "jobset-replicas": Case(job={"nodes": 6, "recovery": {"replicas": 3, "max_restarts": 5}}),
    "jobset-tcp-no-agent-per-rank": Case(job={"gpus_per_node": 1}, target={"agent": False}),
}

RAILS = [{"resource": f"nvidia.com/rail{rail}", "network": f"rdma/rail{rail}"} for rail in range(8)]
FABRIC_DEVICES: Mapping[str, Mapping[str, Any]] = {
    "infiniband": {"resource": "rdma/shared_ib"},
    "roce": {"resource": "rdma/roce"},
    "efa": {"per_node": 32},
    "macvlan": {"network": "macvlan"},
    "sriov": {"rails": RAILS},
    "ib-kubernetes": {"resource": "nvidia.com/ib-vf", "per_node": 8, "network": "rdma/partition-a"},
    "host-device": {"per_node": 8, "network": "hostdev-net"},
    "dra": {"device_class": "rdma.example.com", "per_node": 8, "selector": "device.attributes['example.com'].up"},
    "gke-tcpxo": {"sidecar_image": "registry.example/tcpxo-daemon:1"},
    "gke-rdma": {"rails": [{"network": f"roce-{rail}"} for rail in range(8)]},
    "oke-sriov": {"network": "rdma-vf"},
}
"""What a target has to say about the devices, by fabric."""
FABRIC_CASES: Mapping[str, Case] = {
    name: Case(job={"fabric": name, "name": name}, target={"fabric_device": FABRIC_DEVICES.get(name, {})})
    for name in CATALOG
}
"""A run over each fabric."""


def of_kind(case: Case, workload: str) -> Case:
    """The same run as another kind of object."""
    if workload == "mpijob":
        return Case(job={**case.job, **MPIRUN}, target={**case.target, "agent": False})
    return Case(job=case.job, target={**case.target, "workload": workload})


def render_context(case: Case) -> RenderContext:
    """The render input of a case."""
    job = make_job({**JOB, **case.job}, fabrics=NAMES)
    place = TargetSpec.model_validate({**TARGET, **case.target})
    fabric = CATALOG["tcp" if job.fabric.name == "auto" else job.fabric.name]
    accepted = RunSpec(
        job=job,
        base=VOLUME_ROOT,
        created_at=0.0,
        code=CodeArchive(digest="0" * 64, bytes=10240, files=3, cwd=".") if place.agent else None,
        fabric=fabric.name,
        fabric_env=dict(fabric.env),
        target_kind="kubernetes",
        workload=place.workload,
        durable_controller_disk=place.volume is not None,
        target="cluster",
    )
    return RenderContext(accepted=accepted, target=place, names=ObjectNames.of(job, PLACEHOLDER_ID))


def tree_context(case: Case) -> RenderContext:
    """The render input of the same run in a tree that others apply."""
    ctx = render_context(case)
    return replace(ctx, accepted=ctx.accepted.model_copy(update={"from_tree": True}))
