"""The runs whose manifests are kept as golden files, by the file's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.fabric.catalog import CATALOG, NAMES
from holdfast.job.accepted import Accepted, Shipped
from holdfast.job.document import make_job
from holdfast.job.profile import KUBERNETES, Profile
from holdfast.launch.kubernetes.names import HOME, UNKNOWN_ID, Names
from holdfast.launch.kubernetes.submission import Submission

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
PLACE: Mapping[str, Any] = {
    "backend": "kubernetes",
    "namespace": "ml",
    "queue": "train",
    "volume": {"claim": "checkpoints"},
}
TORCHRUN: Mapping[str, Any] = {"launch": "per-node", "command": ["torchrun", "train.py", "--note", "$(HOME)"]}

MPIRUN: Mapping[str, Any] = {"launch": "mpi", "command": ["mpirun", "python", "train.py"], "env": {"LEVEL": "2"}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What differs from the plain job and place."""

    job: Mapping[str, Any] = field(default_factory=dict[str, Any])
    place: Mapping[str, Any] = field(default_factory=dict[str, Any])


CASES: Mapping[str, Case] = {
    "jobset-tcp": Case(),
    "jobset-tcp-bare": Case(
        job={"secrets": {}, "resources": {}, "gpus_per_node": 0, "recovery": {}},
        place={"queue": None, "volume": None},
    ),
    "jobset-rdma-shared": Case(
        job={"fabric": "rdma-shared"},
        place={
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
    "jobset-sriov": Case(
        job={"fabric": "sriov"},
        place={"fabric_device": {"resource": "nvidia.com/rdma-vf", "per_node": 8, "network": "rdma/rail"}},
    ),
    "jobset-oke-roce": Case(
        job={"fabric": "oke-roce"}, place={"volume": {"claim": "made", "size": "10TiB", "storage_class": "fss"}}
    ),
    "jobset-infiniband": Case(job={"fabric": "infiniband"}, place={"fabric_device": {"resource": "rdma/ib"}}),
    "jobset-efa": Case(job={"fabric": "efa"}, place={"fabric_device": {"per_node": 32}}),
    "jobset-tcp-no-agent": Case(job=TORCHRUN, place={"agent": False}),
    "trainjob-tcp": Case(place={"workload": "trainjob"}),
    "trainjob-sriov-no-agent": Case(
        job={**TORCHRUN, "fabric": "sriov"},
        place={
            "workload": "trainjob",
            "agent": False,
            "fabric_device": {"resource": "nvidia.com/rdma-vf", "per_node": 8, "network": "rdma/rail"},
        },
    ),
    "trainjob-tcp-no-agent-per-rank": Case(job={"gpus_per_node": 1}, place={"workload": "trainjob", "agent": False}),
    "pytorchjob-tcp": Case(place={"workload": "pytorchjob"}),
    "pytorchjob-rdma-shared-no-agent": Case(
        job={**TORCHRUN, "fabric": "rdma-shared"}, place={"workload": "pytorchjob", "agent": False}
    ),
    "pytorchjob-tcp-one-node": Case(job={"nodes": 1}, place={"workload": "pytorchjob"}),
    "mpijob-tcp": Case(job=MPIRUN, place={"agent": False}),
    "mpijob-rdma-shared": Case(job={**MPIRUN, "fabric": "rdma-shared"}, place={"agent": False, "user": 0}),
    "jobset-tcp-mpi": Case(job=MPIRUN),
    "jobset-tcp-no-agent-per-rank": Case(job={"gpus_per_node": 1}, place={"agent": False}),
}


def submission(case: Case) -> Submission:
    """A case as it is rendered."""
    job = make_job({**JOB, **case.job}, fabrics=NAMES)
    place = Profile.model_validate({**PLACE, **case.place})
    fabric = CATALOG["tcp" if job.fabric.name == "auto" else job.fabric.name]
    accepted = Accepted(
        job=job,
        base=HOME,
        created_at=0.0,
        code=Shipped(digest="0" * 64, bytes=10240, files=3, cwd=".") if place.agent else None,
        fabric=fabric.name,
        fabric_env=dict(fabric.env),
        backend=KUBERNETES,
        workload=place.workload,
        lasting=place.volume is not None,
        profile="cluster",
    )
    return Submission(accepted=accepted, profile=place, names=Names.of(job, UNKNOWN_ID))
