"""What a fabric needs of the cluster besides the machines' devices: networks, device classes, daemons. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.preflight.referenced_objects import ReferencedObject

_ATTACHMENTS = "/apis/k8s.cni.cncf.io/v1/namespaces/{}/network-attachment-definitions"


def prerequisites(ctx: RenderContext) -> Iterator[ReferencedObject]:
    """The objects that the fabric needs, each once."""
    access = ctx.pod_access
    for network in dict.fromkeys(filter(None, ctx.multus_networks)):
        namespace, _, name = network.rpartition("/")
        name = name.partition("@")[0]  # Multus takes the name of the interface after it
        yield ReferencedObject(
            kind="NetworkAttachmentDefinition",
            name=network,
            path=f"{_ATTACHMENTS.format(namespace or '{namespace}')}/{name}",
            where="fabric_device.network",
            remedy="`kubectl get network-attachment-definitions -A` lists them; without Multus there are none.",
        )
    for _, network in access.gke_interfaces:
        yield ReferencedObject(
            kind="Network",
            name=network,
            path=f"/apis/networking.gke.io/v1/networks/{network}",
            where="fabric_device.rails",
            remedy="`kubectl get networks` lists them; the cluster needs multi-networking. Name yours in `rails`.",
        )
    if access.claim is not None and access.claim.device_class:
        yield ReferencedObject(
            kind="DeviceClass",
            name=access.claim.device_class,
            path=f"/apis/resource.k8s.io/v1/deviceclasses/{access.claim.device_class}",
            where="fabric_device.device_class",
            remedy="Install the driver that publishes these devices; `kubectl get deviceclasses` lists the classes.",
        )
    for daemon in access.daemon_sets:
        namespace, _, name = daemon.partition("/")
        yield ReferencedObject(
            kind="DaemonSet",
            name=daemon,
            path=f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}",
            where="fabric",
            remedy=f"Install it as the provider describes: `holdfast fabric {ctx.fabric.name}` names the source.",
        )
    if access.deployment:
        yield ReferencedObject(
            kind="Deployment",
            name=access.deployment,
            path="/apis/apps/v1/deployments",
            where="fabric",
            remedy=f"Install it: `holdfast fabric {ctx.fabric.name}` names the source. "
            "Without it pods stay in ContainerCreating.",
            in_any_namespace=True,
        )
