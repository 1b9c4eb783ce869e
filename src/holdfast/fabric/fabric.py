"""What a fabric is: a network that can carry collectives, its variables, and how a Kubernetes pod reaches it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct, field


class Variable(NamedTuple):
    """An environment variable of every rank."""

    name: str
    value: str
    reason: str
    """Why it is set."""


class DeviceClaim(Struct, frozen=True, kw_only=True):
    """Devices that the scheduler allocates to a pod through a ResourceClaim (dynamic resource allocation)."""

    device_class: str = ""
    """Name of the DeviceClass; empty if the target has to name it."""
    count: int = 0
    selector: str = ""
    """A CEL expression about a device, in addition to the class."""


class Sidecar(Struct, frozen=True, kw_only=True):
    """A container next to the ranks that serves their network plugin."""

    name: str
    image: str
    command: tuple[str, ...]
    capabilities: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    """Folders of the machine, and where the container sees them."""
    devices: tuple[str, ...] = ()
    """Device files that the machine's device injector gives it."""


class PodAccess(Struct, frozen=True, kw_only=True):
    """What a Kubernetes pod needs to reach a fabric, beyond its own network.

    A target's `fabric_device` overrides the resource, the number of devices, the claim and the sidecar's image.
    """

    resource: str = ""
    """Resource name of the device plugin, if most clusters use the same name."""
    per_node: int = 0
    """Devices that a node requests; 0 if no device plugin is needed, or if machines differ."""
    multus_attached: bool = False
    """Whether Multus attaches an interface per device to the pod, from networks that the target names."""
    gke_interfaces: tuple[tuple[str, str], ...] = ()
    """Interfaces that GKE attaches to the pod, and the usual name of the Network object of each."""
    claim: DeviceClaim | None = None
    capabilities: tuple[str, ...] = ()
    host_network: bool = False
    """Whether the pod uses its machine's network namespace."""
    privileged: bool = False
    mounts: tuple[tuple[str, str], ...] = ()
    """Folders of the machine, and where the pod's container sees them."""
    huge_pages: str = ""
    """Memory in 2 MiB huge pages for the fabric's library; a pod gets huge pages only on request."""
    sidecar: Sidecar | None = None
    daemon_sets: tuple[str, ...] = ()
    """Daemons that every machine needs, as namespace/name of their DaemonSets as published."""
    deployment: str = ""
    """Daemon of the whole cluster that sets up the interfaces: the name of its Deployment, in any namespace."""
    gpus: int = 0
    """GPUs that a node must request, if a part of the machine cannot use the fabric; 0 if any number can."""


class Fabric(Struct, frozen=True, kw_only=True):
    """A network that can carry collectives."""

    name: str
    description: str
    """One-line description."""
    variables: tuple[Variable, ...]
    """Environment variables for every rank; the job's `fabric.env` and `env` override them."""
    network: str
    """Text of NCCL's `Using network ...` line when the fabric is in use."""
    expected_bandwidth: str
    """Line rate in Gbit/s, by generation if there are several; multiply rates per port by the node's ports."""
    source: str
    """Source of the variables and figures."""
    port_gbit_s: float = 0.0
    """Line rate of one port of the slowest generation, in Gbit/s; 0 if clusters differ or it is the machine's own."""
    pod: PodAccess = field(default_factory=PodAccess)
    """How a Kubernetes pod reaches the fabric."""

    @property
    def env(self) -> Mapping[str, str]:
        """The variables' values by name."""
        return MappingProxyType({each.name: each.value for each in self.variables})
