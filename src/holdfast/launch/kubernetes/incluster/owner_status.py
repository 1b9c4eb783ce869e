"""Marks a run's owner object in the cluster as failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from holdfast.job.targets import Workload

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.client.cluster import ClusterClient


@dataclass(frozen=True, kw_only=True)
class PodOwner:
    """A kind of object that owns a run's pods and shows the run's outcome."""

    path: str
    status: Mapping[str, str]
    """Status fields of a run that failed at `{at}`, in addition to the condition."""


_JOBSET = PodOwner(
    path="/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets", status={"terminalState": "Failed"}
)
POD_OWNERS: Mapping[Workload, PodOwner] = {
    Workload.JOBSET: _JOBSET,
    Workload.TRAINJOB: _JOBSET,  # of the same name; the TrainJob copies its conditions
    Workload.PYTORCHJOB: PodOwner(
        path="/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs", status={"completionTime": "{at}"}
    ),
}


async def mark_failed(cluster: ClusterClient, workload: Workload, run: str, why: str) -> None:
    """Mark the gang's object as failed, after which its operator creates no more pods.

    Raises ClusterError; an ApiError with status 409 if the object has been changed concurrently.
    """
    gang = POD_OWNERS[workload]
    known = await cluster.get(f"{gang.path}/{run}")
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    failed = {"type": "Failed", "status": "True", "reason": "RunFailed", "message": why, "lastTransitionTime": at}
    others = [each for each in known.get("status", {}).get("conditions", ()) if each["type"] != failed["type"]]
    status = {"conditions": [*others, failed]} | {name: value.format(at=at) for name, value in gang.status.items()}
    version = {"resourceVersion": known["metadata"]["resourceVersion"]}
    await cluster.patch(f"{gang.path}/{run}/status", {"metadata": version, "status": status})
