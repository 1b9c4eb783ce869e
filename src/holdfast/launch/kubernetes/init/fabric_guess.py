"""Finds which fabrics of the catalogue a cluster's machines offer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.fabric.catalog import CATALOG
from holdfast.fabric.fabric import Fabric
from holdfast.launch.kubernetes.client.api_paths import KubeObject
from holdfast.launch.kubernetes.init.run_machines import RunMachines

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.init.cluster_survey import ClusterSurvey

# `spec.providerID` of a node begins with its cloud: aws:///us-east-1a/i-0ab, gce://project/zone/name,
# azure:///subscriptions/…; Oracle's is the bare OCID of the instance, ocid1.instance.oc1… CoreWeave labels its nodes
# with node.coreweave.cloud/class and others (docs.coreweave.com, workload scheduling).
_CLOUDS: Mapping[str, str] = {
    "efa": "aws:",
    "gke": "gce:",
    "aks": "azure:",
    "oke": "oci",
    "coreweave": "node.coreweave.cloud/",
}
"""By the first word of a fabric's name, how the provider id or a label of its cloud's machines begins."""

_RDMA_PLUGIN = "rdma/"
"""Default prefix of the RDMA shared device plugin's resources."""


class FabricGuess(Struct, frozen=True, kw_only=True):
    """A fabric that a cluster seems to have."""

    fabric: Fabric
    reason: str
    """What was seen."""
    resource: str = ""
    """The resource, if it is not that of the catalogue."""
    per_node: int = 0
    """Devices that each machine has, if the catalogue leaves the number to the target and machines do not differ."""

    @property
    def needs_number(self) -> bool:
        """Whether the target has to say how many devices a node gets."""
        access = self.fabric.pod
        return bool(access.resource) and not access.per_node and not self.per_node


def guess_fabrics(survey: ClusterSurvey, machines: RunMachines) -> tuple[FabricGuess, ...]:
    """One guess for each resource, set of daemons or device class by which the cluster offers a fabric."""
    best: dict[str, FabricGuess] = {}
    for row in CATALOG.values():
        if not _is_of_this_cloud(row, machines.nodes):
            continue
        for sign, guess in _signs(row, survey, machines):
            if sign not in best or _fit(guess, machines) > _fit(best[sign], machines):
                best[sign] = guess
    return tuple(best.values()) or tuple(_unnamed_rdma(machines))


def _is_of_this_cloud(row: Fabric, nodes: Sequence[KubeObject]) -> bool:
    cloud = _cloud(row)
    signs = (
        each
        for node in nodes
        for each in (node.get("spec", {}).get("providerID", ""), *node["metadata"].get("labels", {}))
    )
    return cloud is None or any(each.startswith(cloud) for each in signs)


def _cloud(row: Fabric) -> str | None:
    return _CLOUDS.get(row.name.partition("-")[0])


def _signs(row: Fabric, survey: ClusterSurvey, machines: RunMachines) -> Iterator[tuple[str, FabricGuess]]:
    """What shows that the cluster has this fabric."""
    access = row.pod
    if amounts := machines.resources.get(access.resource):
        per_node = amounts[0] if not access.per_node and len(set(amounts)) == 1 else 0
        yield access.resource, FabricGuess(fabric=row, reason=machines.seen(access.resource), per_node=per_node)
    daemons = {f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in survey.daemon_sets or ()}
    if access.daemon_sets and daemons.issuperset(access.daemon_sets):
        yield " ".join(access.daemon_sets), FabricGuess(fabric=row, reason=f"has {' and '.join(access.daemon_sets)}")
    classes = {each["metadata"]["name"] for each in survey.device_classes or ()}
    if access.claim and access.claim.device_class in classes:
        reason = f"has DeviceClass {access.claim.device_class}"
        yield access.claim.device_class, FabricGuess(fabric=row, reason=reason)


def _fit(guess: FabricGuess, machines: RunMachines) -> tuple[bool, bool]:
    """How closely a row describes the machines: it is their cloud's, and has their number of devices."""
    amounts = machines.resources.get(guess.fabric.pod.resource, [])
    return _cloud(guess.fabric) is not None, set(amounts) == {guess.fabric.pod.per_node}


def _unnamed_rdma(machines: RunMachines) -> Iterator[FabricGuess]:
    """Devices of the RDMA shared device plugin, whose name the cluster chose."""
    for resource in machines.resources:
        if resource.startswith(_RDMA_PLUGIN):
            yield FabricGuess(fabric=CATALOG["rdma-shared"], reason=machines.seen(resource), resource=resource)
