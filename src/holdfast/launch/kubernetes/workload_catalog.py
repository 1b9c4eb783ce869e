"""The kinds of object from which an operator creates a run's nodes, one row each."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct, field

from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.object_names import NODE

_NUMBER = re.compile(r"[0-9]{1,9}")


class NodeLabels(Struct, frozen=True, kw_only=True):
    """The labels that have a pod's node number."""

    label: str
    offset_label: tuple[str, str] | None = None
    """A label, and its value in pods numbered from 1, because another group with one pod comes first."""

    def node(self, labels: Mapping[str, str]) -> int | None:
        """The node's number; None for a foreign pod with the run's labels."""
        number = labels.get(self.label, "")
        if not _NUMBER.fullmatch(number):
            return None
        return int(number) + (
            self.offset_label is not None and labels.get(self.offset_label[0]) == self.offset_label[1]
        )


class WorkloadKind(Struct, frozen=True, kw_only=True):
    """A kind of object."""

    kind: str
    group: str
    version: str
    """API version that the manifests use."""
    operator: str
    """Name of the operator's Deployment, as published."""
    node_labels: NodeLabels
    container: str = NODE
    """Name of the container with the ranks."""
    command_labels: NodeLabels | None = None
    """The labels of pods that run the user's command instead of an agent, if they differ."""
    job_per_node: bool = False
    """Whether with agents each node has its own Job, which its operator recreates immediately after a deletion."""
    pod_owner: Workload | None = None
    """The kind of object of the same name that it creates for the pods, and whose conditions it copies."""
    held_by: tuple[str, ...] = ("suspend",)
    """The field of its spec that Kueue sets while it holds the run back."""
    never_completes: bool = False
    """Whether its pods restart whatever their exit code: the controller marks its end, and scales it to 0."""
    failed_status: Mapping[str, str] = field(default_factory=dict[str, str])
    """Status fields of a run that failed at `{at}`, in addition to the condition."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"

    @property
    def resource(self) -> str:
        return f"{self.kind.lower()}s"

    @property
    def path(self) -> str:
        """API path of the objects."""
        return f"/apis/{self.api_version}/namespaces/{{namespace}}/{self.resource}"

    @property
    def kueue_framework(self) -> str:
        """Kueue's name of its integration."""
        return f"{self.group}/{self.kind.lower()}"


_INDEX = NodeLabels(label="batch.kubernetes.io/job-completion-index")

CATALOG: Mapping[Workload, WorkloadKind] = {
    Workload.JOBSET: WorkloadKind(
        kind="JobSet",
        group="jobset.x-k8s.io",
        version="v1alpha2",
        operator="jobset-controller-manager",
        node_labels=NodeLabels(label="jobset.sigs.k8s.io/job-index"),
        command_labels=_INDEX,
        job_per_node=True,
        failed_status={"terminalState": "Failed"},
    ),
    Workload.TRAINJOB: WorkloadKind(
        kind="TrainJob",
        group="trainer.kubeflow.org",
        version="v1alpha1",
        operator="kubeflow-trainer-controller-manager",
        node_labels=_INDEX,
        pod_owner=Workload.JOBSET,
    ),
    Workload.PYTORCHJOB: WorkloadKind(
        kind="PyTorchJob",
        group="kubeflow.org",
        version="v1",
        operator="training-operator",
        node_labels=NodeLabels(
            label="training.kubeflow.org/replica-index", offset_label=("training.kubeflow.org/replica-type", "worker")
        ),
        container="pytorch",
        held_by=("runPolicy", "suspend"),
        failed_status={"completionTime": "{at}"},
    ),
    Workload.MPIJOB: WorkloadKind(
        kind="MPIJob",
        group="kubeflow.org",
        version="v2beta1",
        operator="mpi-operator",
        node_labels=NodeLabels(label="training.kubeflow.org/replica-index"),
        container="worker",
        held_by=("runPolicy", "suspend"),
        failed_status={"completionTime": "{at}"},
    ),
    Workload.LEADERWORKERSET: WorkloadKind(
        kind="LeaderWorkerSet",
        group="leaderworkerset.x-k8s.io",
        version="v1",
        operator="lws-controller-manager",
        node_labels=NodeLabels(label="leaderworkerset.sigs.k8s.io/worker-index"),
        held_by=(
            *("leaderWorkerTemplate", "workerTemplate", "metadata", "annotations"),
            "kueue.x-k8s.io/pod-suspending-parent",
        ),
        never_completes=True,
    ),
}


def pod_owner(workload: Workload) -> WorkloadKind:
    """The kind of the object that creates the pods of a run."""
    kind = CATALOG[workload]
    return CATALOG[kind.pod_owner] if kind.pod_owner else kind
