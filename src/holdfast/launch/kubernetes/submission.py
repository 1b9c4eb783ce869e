"""Owns what a rendering starts from: the job as accepted, the place it goes to, and what its parts will be called."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.fabric.catalog import CATALOG, Fabric, PodAccess
from holdfast.job.accepted import Accepted
from holdfast.job.profile import Profile, Workload
from holdfast.job.spec import Job, Launch
from holdfast.launch.kubernetes.names import HOME, RUNS, Names


def workload(job: Job, profile: Profile) -> Workload:
    """The kind of object a run becomes: what the profile says, but for `mpirun` without an agent to start it by."""
    return Workload.MPIJOB if job.launch is Launch.MPI and not profile.agent else profile.workload


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One run on its way to a cluster."""

    accepted: Accepted
    profile: Profile
    names: Names

    @property
    def job(self) -> Job:
        return self.accepted.job

    @property
    def fabric(self) -> Fabric:
        return CATALOG[self.accepted.fabric]

    @property
    def access(self) -> PodAccess:
        """How its pods reach the fabric, with what this cluster calls the devices."""
        device, pod = self.profile.fabric_device, self.fabric.pod
        return replace(pod, resource=device.resource or pod.resource, per_node=device.per_node or pod.per_node)

    @property
    def workload(self) -> Workload:
        return workload(self.job, self.profile)

    @property
    def queue(self) -> str | None:
        return self.job.queue or self.profile.queue

    @property
    def run_folder(self) -> str:
        return f"{HOME}/{RUNS}/{self.names.name}"
