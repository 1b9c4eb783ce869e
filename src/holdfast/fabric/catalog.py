"""Owns the fabrics that holdfast knows: one row each, with what it sets for every rank and what to expect of it.

A row makes NCCL fail where the fabric is missing. NCCL's own default is to fall back to TCP and say so in one line of
a log, which is how runs come to train ten times too slowly. Site details (which HCA, which GID index) are not here:
they belong to the job's or the site's `fabric.env`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

AUTO = "auto"
"""What a job says that takes the target's fabric."""
LOCAL_DEFAULT = "tcp"

_NCCL_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


@dataclass(frozen=True, kw_only=True)
class PodAccess:
    """What a pod on Kubernetes needs to reach a fabric, beyond its own network; a target's `fabric_device` goes over
    the first three.
    """

    resource: str = ""
    """Name under which a device plugin offers the fabric's devices, where it has one that most clusters use."""
    per_node: int = 0
    """Devices that a node of the job asks for; none where no device plugin is needed, or where machines differ."""
    multus_attached: bool = False
    """Whether Multus gives the pod an interface for each device, by a network that the target names."""
    capabilities: tuple[str, ...] = ()
    host_network: bool = False
    """The pod shares its machine's network: addresses, names and all."""
    privileged: bool = False
    host_paths: tuple[str, ...] = ()
    """Folders of the machine that the pod sees."""
    huge_pages: str = ""
    """Memory in pages of 2 MiB that the fabric's library takes; only pods that ask for them get any."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A network that can carry collectives."""

    name: str
    description: str
    """One line for a person."""
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Variables for every rank; the job's own `fabric.env` and `env` go over them."""
    network: str
    """What NCCL's `Using network ...` line says when the fabric is in use."""
    expected_bandwidth: str
    """Line rate in Gbit/s, by generation where there are several; what a node gets is this times its ports."""
    source: str
    """Where the variables and the figures come from."""
    pod: PodAccess
    """How a pod on Kubernetes reaches it."""


# One request gives the pod all of its machine's adapters. Clusters call it `rdma/ib`, `rdma/shared_ib` and otherwise;
# the target says. RDMA pins memory, which the kernel bounds for whoever lacks IPC_LOCK.
_SHARED = PodAccess(per_node=1, capabilities=("IPC_LOCK",))

# NCCL_NET names the one network module NCCL may use; where it cannot be had, NCCL fails instead of falling back.
_ROWS = (
    Fabric(
        name="tcp",
        description="Plain TCP sockets over whatever network there is; runs everywhere.",
        env=MappingProxyType({"NCCL_NET": "Socket"}),
        network="Socket",
        expected_bandwidth="that of the network card, less what one core can copy",
        source=f"{_NCCL_ENV}#nccl-net",
        pod=PodAccess(),
    ),
    Fabric(
        name="infiniband",
        description="InfiniBand verbs through NCCL's own IB transport.",
        env=MappingProxyType({"NCCL_NET": "IB"}),
        network="IB",
        expected_bandwidth="per port: HDR 200, NDR 400, XDR 800 Gbit/s",
        source=f"{_NCCL_ENV}#nccl-net; https://www.infinibandta.org/infiniband-roadmap; "
        "https://docs.coreweave.com/products/networking/hpc-interconnect/use-gpudirect-rdma",
        pod=_SHARED,
    ),
    Fabric(
        # NCCL_IB_GID_INDEX is left alone: since 2.21 NCCL finds the RoCE v2 GID itself, and a wrong index is a
        # well-known way to lose it.
        name="roce",
        description="RDMA over Ethernet (RoCE v2) through NCCL's own IB transport.",
        env=MappingProxyType({"NCCL_NET": "IB"}),
        network="IB",
        expected_bandwidth="per port: 100, 200 or 400 Gbit/s Ethernet",
        source=f"{_NCCL_ENV}#nccl-net; {_NCCL_ENV}#nccl-ib-gid-index",
        pod=_SHARED,
    ),
    Fabric(
        # The plugin called its network "AWS Libfabric" alone up to 1.11 and answers to both names since, so the old
        # name is the one that every version knows.
        name="efa",
        description="AWS Elastic Fabric Adapter through libfabric and the aws-ofi-nccl plugin, which the image must have.",
        env=MappingProxyType({"NCCL_NET": "AWS Libfabric", "FI_PROVIDER": "efa"}),
        network="AWS Libfabric",
        expected_bandwidth="per node: p4d 400, p5 3200 Gbit/s",
        source="https://github.com/aws/aws-ofi-nccl/pull/530; "
        "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html; "
        "https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html",
        # libfabric's EFA provider puts its buffers in huge pages, of which a container that asked for none may touch
        # none. A machine has 1 to 32 adapters by its type, and a job that asks for fewer leaves bandwidth behind.
        pod=PodAccess(resource="vpc.amazonaws.com/efa", huge_pages="5120Mi"),
    ),
    Fabric(
        name="rdma-shared",
        description="InfiniBand or RoCE adapters that pods share, given out by the RDMA shared device plugin.",
        env=MappingProxyType({"NCCL_NET": "IB"}),
        network="IB",
        expected_bandwidth="per port: that of the adapter, shared by the pods on its machine",
        source="https://github.com/Mellanox/k8s-rdma-shared-dev-plugin",
        pod=replace(_SHARED, resource="rdma/hca_shared_devices_a"),
    ),
    Fabric(
        name="sriov",
        description="InfiniBand or RoCE virtual functions of the pod's own, each attached by Multus.",
        env=MappingProxyType({"NCCL_NET": "IB"}),
        network="IB",
        expected_bandwidth="per function: what the adapter's port gives it",
        source="https://github.com/k8snetworkplumbingwg/sriov-network-device-plugin",
        pod=PodAccess(per_node=1, multus_attached=True, capabilities=("IPC_LOCK",)),
    ),
    Fabric(
        # As published for bare-metal shapes on their host network; the adapters named are those of BM.GPU.H100.8.
        name="oke-roce",
        description="RoCE of Oracle's bare-metal GPU shapes (OKE) on the host network; the adapters are those of H100.",
        env=MappingProxyType(
            {
                "NCCL_NET": "IB",
                "NCCL_CUMEM_ENABLE": "0",
                "NCCL_IB_SPLIT_DATA_ON_QPS": "0",
                "NCCL_IB_GID_INDEX": "3",
                "NCCL_IB_HCA": "=" + ",".join(f"mlx5_{port}" for port in (0, 1, *range(3, 11), *range(12, 18))),
                "NCCL_IB_TC": "41",
                "NCCL_IB_SL": "0",
                "NCCL_IB_TIMEOUT": "22",
                "NCCL_SOCKET_IFNAME": "eth0",
                "NCCL_IGNORE_CPU_AFFINITY": "1",
            }
        ),
        network="IB",
        expected_bandwidth="per node: 16 ports of 200 Gbit/s",
        source="https://github.com/oracle-quickstart/oci-hpc-oke/blob/main/manifests/nccl-tests/host-network/",
        pod=PodAccess(capabilities=("IPC_LOCK",), host_network=True, privileged=True, host_paths=("/dev/infiniband",)),
    ),
)

CATALOG: Mapping[str, Fabric] = MappingProxyType({row.name: row for row in _ROWS})
"""Every fabric by its name."""

NAMES: tuple[str, ...] = (AUTO, *CATALOG)
"""What a job may write as its fabric."""


def resolve(job_fabric: str, target_fabric: str | None) -> Fabric:
    """The fabric of a run: the job's own, or for `auto` the target's, or else that of one machine.

    Raises KeyError for a name that is not in the catalogue; jobs and targets are checked before.
    """
    name = job_fabric if job_fabric != AUTO else target_fabric or LOCAL_DEFAULT
    return CATALOG[LOCAL_DEFAULT if name == AUTO else name]
