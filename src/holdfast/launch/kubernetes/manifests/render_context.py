"""The input of rendering: the accepted job, the target and the object names."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from holdfast.fabric.catalog import CATALOG
from holdfast.fabric.fabric import Fabric, PodAccess
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job, Launch
from holdfast.job.targets import GangScheduler, TargetSpec, Workload
from holdfast.launch.kubernetes.manifests.yaml_writer import YamlValue
from holdfast.launch.kubernetes.object_names import RUNS, VOLUME_ROOT, ObjectNames

SET_AT_START = "(set when the run is started)"
"""Stands in rendered manifests for a value that the start of the run fills in."""


def workload_kind(job: Job, target: TargetSpec) -> Workload:
    """The run's kind of object: the target's, or an MPIJob for `mpirun` without agents."""
    return Workload.MPIJOB if job.launch is Launch.MPI and not target.agent else target.workload


class RenderContext(Struct, frozen=True, kw_only=True):
    """One run to render."""

    accepted: RunSpec
    target: TargetSpec
    names: ObjectNames
    user: str = SET_AT_START
    """The user who starts the run."""

    @property
    def job(self) -> Job:
        return self.accepted.job

    @property
    def fabric(self) -> Fabric:
        return CATALOG[self.accepted.fabric]

    @property
    def pod_access(self) -> PodAccess:
        """How its pods reach the fabric, with this cluster's device names."""
        device, pod = self.target.fabric_device, self.fabric.pod
        claim, sidecar = pod.claim, pod.sidecar
        if claim is not None:
            claim = replace(
                claim,
                device_class=device.device_class or claim.device_class,
                count=device.per_node or claim.count,
                selector=device.selector or claim.selector,
            )
        if sidecar is not None:
            sidecar = replace(sidecar, image=device.sidecar_image or sidecar.image)
        return replace(
            pod,
            resource=device.resource or pod.resource,
            per_node=0 if claim else len(device.rails) or device.per_node or pod.per_node,
            gke_interfaces=tuple(
                (interface, rail.network or usual)
                for (interface, usual), rail in zip(pod.gke_interfaces, device.rails, strict=False)
            )
            or pod.gke_interfaces,
            claim=claim,
            # An added capability counts for root only; without it, stricter levels of Pod Security admit the pod.
            capabilities=() if self.target.user and not pod.privileged else pod.capabilities,
            sidecar=sidecar,
        )

    @property
    def fabric_resources(self) -> Mapping[str, int]:
        """The devices of the fabric that a node requests from device plugins, by resource name."""
        access, rails = self.pod_access, self.target.fabric_device.rails
        if access.claim is not None or access.gke_interfaces:
            return {}
        names = [rail.resource or access.resource for rail in rails] or [access.resource] * access.per_node
        return {name: names.count(name) for name in names if name}

    @property
    def multus_networks(self) -> tuple[str, ...]:
        """The network attachment of each interface that Multus adds to a node, in their order; one may be unknown."""
        access, device = self.pod_access, self.target.fabric_device
        if not access.multus_attached:
            return ()
        rails = [rail.network or device.network or "" for rail in device.rails]
        return tuple(rails or [device.network or ""] * access.per_node)

    @property
    def placed_by_volcano(self) -> bool:
        """Whether Volcano, and not Kueue, places the nodes in the network."""
        return self.job.placement is not None and self.queue is None and self.target.pod_group is GangScheduler.VOLCANO

    def topology_label(self, level: str) -> str | None:
        """The machine label of a placement's level; None if the target does not have the name."""
        return self.target.topology_levels.get(level, level if "/" in level else None)

    @property
    def workload(self) -> Workload:
        return workload_kind(self.job, self.target)

    @property
    def queue(self) -> str | None:
        return self.job.queue or self.target.queue

    def manifest(
        self,
        api_version: str,
        kind: str,
        name: str,
        part: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        annotations: Mapping[str, YamlValue] | None = None,
        **fields: YamlValue,
    ) -> Mapping[str, YamlValue]:
        """The manifest of an object of the run, or of one part of it."""
        every = {**self.names.labels(part), **(labels or {})}
        metadata: YamlValue = {"name": name, "namespace": self.target.namespace, "labels": every}
        if annotations:
            metadata = {**metadata, "annotations": annotations}
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}

    @property
    def run_dir(self) -> str:
        return f"{VOLUME_ROOT}/{RUNS}/{self.names.name}"
