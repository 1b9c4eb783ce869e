"""The kinds of object that create the pods of a training job, one row each, and how each is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from holdfast.job.yaml_source import Path
from holdfast.launch.kubernetes.foreign.manifest_source import (
    ManifestObject,
    as_count,
    as_list,
    as_mapping,
    as_text,
)
from holdfast.launch.kubernetes.foreign.training_workload import (
    QUEUE_LABEL,
    NodeGroup,
    PodForm,
    TrainingWorkload,
    read_container,
    read_pod,
)

_JOB_NAME = "training.kubeflow.org/job-name"


class ForeignKind(Struct, frozen=True, kw_only=True):
    """One kind of object."""

    groups: Callable[[ManifestObject], Iterator[NodeGroup]]
    """Reads its groups of nodes."""
    job_label: str = ""
    """The label of its pods whose value is the object's name; none if its user chooses the labels."""
    trains: bool = False
    """Whether it is for training only; others count if they request GPUs or start a launcher."""
    jobset: Path = ()
    """Path of the JobSet's spec that it has, if it has one."""


def _replica_specs(field: str, launcher: str = "") -> Callable[[ManifestObject], Iterator[NodeGroup]]:
    """Kubeflow's form: a mapping from roles to replicas and a template."""

    def read(target: ManifestObject) -> Iterator[NodeGroup]:
        for role, spec in as_mapping(target.at(("spec", field))).items():
            path: Path = ("spec", field, role)
            pod = read_pod(target, (*path, "template"))
            if pod is not None:
                count = as_mapping(spec).get("replicas", 1)
                runs_ranks = target.at(("spec", "runLauncherAsWorker")) is True
                launches = role == launcher and not runs_ranks
                yield NodeGroup(name=role, replicas=as_count(count), pod=pod, path=path, launches=launches)

    return read


def _tasks(target: ManifestObject) -> Iterator[NodeGroup]:
    """Volcano's form: a list of tasks."""
    for number, task in enumerate(as_list(target.at(("spec", "tasks")))):
        path: Path = ("spec", "tasks", number)
        data = as_mapping(task)
        pod = read_pod(target, (*path, "template"))
        if pod is not None:
            launches = any(each.runs_mpirun for each in pod.containers) and not pod.main.gpu_resource
            yield NodeGroup(
                name=as_text(data.get("name")) or f"task {number}",
                replicas=as_count(data.get("replicas", 1)),
                pod=pod,
                path=path,
                launches=launches,
            )


def _single(count: str) -> Callable[[ManifestObject], Iterator[NodeGroup]]:
    """One template, whose number of pods is `spec.COUNT`."""

    def read(target: ManifestObject) -> Iterator[NodeGroup]:
        pod = read_pod(target, ("spec", "template"))
        if pod is not None:
            replicas = as_count(as_mapping(target.at(("spec",))).get(count, 1))
            yield NodeGroup(name="pods", replicas=replicas, pod=pod, path=("spec",))

    return read


def _replicated_jobs(start: Path, nodes: Path | None = None) -> Callable[[ManifestObject], Iterator[NodeGroup]]:
    """A JobSet's form: Jobs, each with a number of replicas and of pods; `nodes` overrides the trainer's pods."""

    def read(target: ManifestObject) -> Iterator[NodeGroup]:
        for number, job in enumerate(as_list(target.at((*start, "replicatedJobs")))):
            path: Path = (*start, "replicatedJobs", number)
            data = as_mapping(job)
            pod = read_pod(target, (*path, "template", "spec", "template"))
            if pod is None:
                continue
            name = as_text(data.get("name"))
            jobs = as_count(data.get("replicas", 1))
            pods = as_count(as_mapping(target.at((*path, "template", "spec"))).get("parallelism", 1))
            count = jobs * pods if jobs is not None and pods is not None else None
            if nodes is not None and name == "node":
                count = as_count(target.at(nodes))
            launches = name == "launcher" or (pod.main.runs_mpirun and not pod.main.gpu_resource)
            yield NodeGroup(name=name, replicas=count, pod=pod, path=path, launches=launches)

    return read


def _trainer(target: ManifestObject) -> Iterator[NodeGroup]:
    """A TrainJob's form: what it changes of its runtime's container; the rest of the pod is in the runtime."""
    path: Path = ("spec", "trainer")
    container = replace(read_container(target, path, resources="resourcesPerNode"), name="node")
    pod = PodForm(path=path, spec={}, labels={}, annotations={}, containers=(container,), volumes=(), complete=False)
    yield NodeGroup(name="trainer", replicas=as_count(target.at((*path, "numNodes"))), pod=pod, path=path)


_RUNTIME = ForeignKind(
    groups=_replicated_jobs(("spec", "template", "spec"), nodes=("spec", "mlPolicy", "numNodes")),
    job_label="jobset.sigs.k8s.io/jobset-name",
    jobset=("spec", "template", "spec"),
    trains=True,
)

KINDS: Mapping[tuple[str, str], ForeignKind] = MappingProxyType(
    {
        ("kubeflow.org", "PyTorchJob"): ForeignKind(
            groups=_replica_specs("pytorchReplicaSpecs"), job_label=_JOB_NAME, trains=True
        ),
        ("kubeflow.org", "MPIJob"): ForeignKind(
            groups=_replica_specs("mpiReplicaSpecs", launcher="Launcher"), job_label=_JOB_NAME, trains=True
        ),
        ("trainer.kubeflow.org", "TrainJob"): ForeignKind(groups=_trainer, trains=True),
        ("trainer.kubeflow.org", "TrainingRuntime"): _RUNTIME,
        ("trainer.kubeflow.org", "ClusterTrainingRuntime"): _RUNTIME,
        ("jobset.x-k8s.io", "JobSet"): ForeignKind(
            groups=_replicated_jobs(("spec",)), job_label="jobset.sigs.k8s.io/jobset-name", jobset=("spec",)
        ),
        ("batch.volcano.sh", "Job"): ForeignKind(groups=_tasks, job_label="volcano.sh/job-name"),
        ("batch", "Job"): ForeignKind(groups=_single("parallelism"), job_label="batch.kubernetes.io/job-name"),
        ("apps", "StatefulSet"): ForeignKind(groups=_single("replicas")),
    }
)
"""The kinds, by API group and name."""

_COMPANIONS = re.compile(
    r"v1|(apps|networking\.k8s\.io|rbac\.authorization\.k8s\.io|storage\.k8s\.io|policy|scheduling\.k8s\.io|"
    r"scheduling\.volcano\.sh|"
    r"kueue\.x-k8s\.io|resource\.(k8s\.io|nvidia\.com)|k8s\.cni\.cncf\.io|apiextensions\.k8s\.io)/\w+"
)


def kind_of(target: ManifestObject) -> ForeignKind | None:
    """The row of an object's kind; None if it is none of training."""
    return KINDS.get((target.api_group, target.kind))


def is_companion(target: ManifestObject) -> bool:
    """Whether an object such as a Service or a claim only accompanies a workload."""
    return kind_of(target) is None and _COMPANIONS.fullmatch(target.api_version) is not None


def read_workload(target: ManifestObject) -> TrainingWorkload | None:
    """The workload that an object describes; None for another kind, or without a pod."""
    kind = kind_of(target)
    if kind is None or not (groups := tuple(kind.groups(target))):
        return None
    queue = as_text(as_mapping(target.at(("metadata", "labels"))).get(QUEUE_LABEL))
    return TrainingWorkload(target=target, groups=groups, queue=queue, of_training_kind=kind.trains)
