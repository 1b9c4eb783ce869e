"""Checks the volume of runs: its claim, or the storage class and the driver that will make it."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.findings import Finding, Severity
from holdfast.launch.kubernetes.client.api_paths import KubeObject, object_name
from holdfast.launch.kubernetes.manifests.quantities import format_quantity
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.preflight import node_affinity
from holdfast.launch.kubernetes.preflight.cluster_finding import cluster_finding
from holdfast.launch.kubernetes.preflight.cluster_inventory import NOT_READABLE, ClusterInventory
from holdfast.launch.kubernetes.storage_catalog import StorageKind, class_of, find_driver, shared_driver


def claim(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the volume's claim exists or can be created, and is shared (ReadWriteMany)."""
    volume = ctx.target.volume
    if volume is None:
        return
    if cluster.claim is None:
        if volume.size is None:
            what = f"there is no claim {volume.claim} in namespace {ctx.target.namespace}"
            yield cluster_finding("claim-missing", "volume", what, "Make it, or give `volume.size` to have it made.")
            return
        known = cluster.storage_classes
        if volume.storage_class and known is not None and class_of(known, volume.storage_class) is None:
            what = f"there is no storage class {volume.storage_class}"
            seen = f"there are: {', '.join(sorted(map(object_name, known)))}"
            yield cluster_finding("storage-class-missing", "volume", what, "Name one that is there.", seen)
        return
    modes = cluster.claim.get("spec", {}).get("accessModes", [])
    if cluster.claim is not NOT_READABLE and ctx.job.nodes.max > 1 and "ReadWriteMany" not in modes:
        what = f"claim {volume.claim} can be mounted on one machine only"
        remedy = "Use a claim whose access mode is ReadWriteMany."
        yield cluster_finding("claim-not-shared", "volume", what, remedy, f"accessModes: {', '.join(modes)}")


def driver(ctx: RenderContext, cluster: ClusterInventory) -> Iterator[Finding]:
    """Checks that the driver of the volume, or of the class that will make one, suits all nodes and is installed."""
    chosen = _class_to_use(ctx, cluster)
    name = chosen["provisioner"] if chosen else cluster.volume.get("spec", {}).get("csi", {}).get("driver")
    known = find_driver(name) if name else None
    if ctx.target.volume is None or known is None:
        return
    shared = cluster.claim is None or "ReadWriteMany" in cluster.claim["spec"].get("accessModes", ())
    if known.kind is not StorageKind.FILES and ctx.job.nodes.max > 1 and shared:
        makes = f"storage class {object_name(chosen)} makes" if chosen else f"claim {ctx.target.volume.claim} has"
        what = f"{makes} a volume of {known.name}: {known.kind.meaning}"
        fit = [object_name(each) for each in cluster.storage_classes or () if shared_driver(each)]
        seen = [f"classes for many machines here: {', '.join(fit) or 'none that holdfast knows'}"] if chosen else []
        remedy = "Use a claim or a `storage_class` of a file system that many machines mount for writing."
        yield cluster_finding("storage-not-shared", "volume", what, remedy, *seen)
    if chosen is None:
        return
    needed = known.csi_driver_of(chosen)
    if needed and cluster.csi_drivers is not None and needed not in cluster.csi_drivers:
        what = f"there is no CSIDriver {needed}, which makes and mounts the volumes of class {object_name(chosen)}"
        remedy = "Have the driver installed, or name another `storage_class`."
        yield cluster_finding("storage-driver-missing", "volume", what, remedy, f"driver: {known.source}")
    size, least = ctx.target.volume.size, known.smallest_of(chosen)
    if cluster.claim is None and size is not None and size < least:
        smallest = format_quantity(least)
        what = f"the smallest volume of storage class {object_name(chosen)} ({known.name}) has {smallest}"
        remedy = f"Write `size: {smallest}B` or more: the driver makes a volume of this size, or refuses the claim."
        yield cluster_finding("claim-too-small", "volume.size", what, remedy, known.source, severity=Severity.WARNING)


def volume_terms(ctx: RenderContext, cluster: ClusterInventory) -> node_affinity.Terms:
    """The machines that can mount the volume."""
    return node_affinity.of_volume(cluster.volume) or node_affinity.of_class(_class_to_use(ctx, cluster) or {})


def _class_to_use(ctx: RenderContext, cluster: ClusterInventory) -> KubeObject | None:
    """The StorageClass that will make the volume; None if there is a volume, or the class is not known."""
    volume = ctx.target.volume
    if volume is None or cluster.storage_classes is None or cluster.claim is NOT_READABLE:
        return None
    if cluster.claim is None:
        return class_of(cluster.storage_classes, volume.storage_class) if volume.size else None
    spec = cluster.claim["spec"]
    return None if "volumeName" in spec else class_of(cluster.storage_classes, spec.get("storageClassName"))
