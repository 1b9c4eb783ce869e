"""Owns what a rendering starts from: the job as accepted, the place it goes to, and what its parts will be called."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.fabric.catalog import CATALOG, Fabric, PodAccess
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job, Launch
from holdfast.job.targets import Target, Workload
from holdfast.launch.kubernetes.object_names import RUNS, VOLUME_ROOT, ObjectNames


def workload_kind(job: Job, target: Target) -> Workload:
    """The kind of object a run becomes: what the target says, but for `mpirun` without an agent to start it by."""
    return Workload.MPIJOB if job.launch is Launch.MPI and not target.agent else target.workload


@dataclass(frozen=True, kw_only=True)
class RenderContext:
    """One run on its way to a cluster."""

    accepted: RunSpec
    target: Target
    names: ObjectNames

    @property
    def job(self) -> Job:
        return self.accepted.job

    @property
    def fabric(self) -> Fabric:
        return CATALOG[self.accepted.fabric]

    @property
    def pod_access(self) -> PodAccess:
        """How its pods reach the fabric, with what this cluster calls the devices."""
        device, pod = self.target.fabric_device, self.fabric.pod
        return replace(pod, resource=device.resource or pod.resource, per_node=device.per_node or pod.per_node)

    @property
    def workload(self) -> Workload:
        return workload_kind(self.job, self.target)

    @property
    def queue(self) -> str | None:
        return self.job.queue or self.target.queue

    @property
    def run_dir(self) -> str:
        return f"{VOLUME_ROOT}/{RUNS}/{self.names.name}"
