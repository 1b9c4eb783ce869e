"""Owns how a run's own object in the cluster is made to say that the run has failed."""

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
    """What makes a run's pods, and shows how the run ended."""

    path: str
    status: Mapping[str, str]
    """What its status says of a run that has failed at `{at}`, beside the condition."""


_JOBSET = PodOwner(
    path="/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets", status={"terminalState": "Failed"}
)
POD_OWNERS: Mapping[Workload, PodOwner] = {
    Workload.JOBSET: _JOBSET,
    Workload.TRAINJOB: _JOBSET,  # of the same name; the TrainJob says of itself what it says
    Workload.PYTORCHJOB: PodOwner(
        path="/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs", status={"completionTime": "{at}"}
    ),
}


async def mark_failed(cluster: ClusterClient, workload: Workload, run: str, why: str) -> None:
    """Have the gang's own object say that the run has failed, after which its operator makes no pod any more.

    Raises as a cluster does; where somebody else has changed the object meanwhile, ApiError a conflict.
    """
    gang = POD_OWNERS[workload]
    known = await cluster.get(f"{gang.path}/{run}")
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    failed = {"type": "Failed", "status": "True", "reason": "RunFailed", "message": why, "lastTransitionTime": at}
    others = [each for each in known.get("status", {}).get("conditions", ()) if each["type"] != failed["type"]]
    status = {"conditions": [*others, failed]} | {name: value.format(at=at) for name, value in gang.status.items()}
    version = {"resourceVersion": known["metadata"]["resourceVersion"]}
    await cluster.patch(f"{gang.path}/{run}/status", {"metadata": version, "status": status})
