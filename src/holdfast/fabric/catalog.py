"""The catalogue of fabrics, one row each: variables for every rank, and expected bandwidth.

A row makes NCCL fail if the fabric is missing. By default NCCL falls back to TCP with a single log line, and the run
may train ten times slower. Site details (which HCA, which GID index) belong to the job's or the site's `fabric.env`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

AUTO = "auto"
"""Fabric name that means the target's fabric."""
LOCAL_DEFAULT = "tcp"

_NCCL_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


@dataclass(frozen=True, kw_only=True)
class PodAccess:
    """What a Kubernetes pod needs to reach a fabric, beyond its own network.

    A target's `fabric_device` overrides the first three fields.
    """

    resource: str = ""
    """Resource name of the device plugin, if most clusters use the same name."""
    per_node: int = 0
    """Devices that a node requests; 0 if no device plugin is needed, or if machines differ."""
    multus_attached: bool = False
    """Whether Multus attaches an interface per device to the pod, from a network that the target names."""
    capabilities: tuple[str, ...] = ()
    host_network: bool = False
    """Whether the pod uses its machine's network namespace."""
    privileged: bool = False
    host_paths: tuple[str, ...] = ()
    """Folders of the machine that are mounted into the pod."""
    huge_pages: str = ""
    """Memory in 2 MiB huge pages for the fabric's library; a pod gets huge pages only on request."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A network that can carry collectives."""

    name: str
    description: str
    """One-line description."""
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Environment variables for every rank; the job's `fabric.env` and `env` override them."""
    network: str
    """Text of NCCL's `Using network ...` line when the fabric is in use."""
    expected_bandwidth: str
    """Line rate in Gbit/s, by generation if there are several; multiply rates per port by the node's ports."""
    source: str
    """Source of the variables and figures."""
    pod: PodAccess
    """How a Kubernetes pod reaches the fabric."""


# One device gives the pod all adapters of its machine. Clusters name it `rdma/ib`, `rdma/shared_ib` or otherwise; the
# target sets the name. RDMA pins memory, which the kernel limits for processes without IPC_LOCK.
_SHARED = PodAccess(per_node=1, capabilities=("IPC_LOCK",))

# NCCL_NET names the only network module NCCL may use; if it is unavailable, NCCL fails instead of falling back.
_ROWS = (
    Fabric(
        name="tcp",
        description="TCP sockets over any network; works everywhere.",
        env=MappingProxyType({"NCCL_NET": "Socket"}),
        network="Socket",
        expected_bandwidth="that of the network card, limited by the copy rate of one core",
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
        # NCCL_IB_GID_INDEX is not set: since 2.21 NCCL finds the RoCE v2 GID itself, and a wrong index is a common
        # misconfiguration.
        name="roce",
        description="RDMA over Ethernet (RoCE v2) through NCCL's own IB transport.",
        env=MappingProxyType({"NCCL_NET": "IB"}),
        network="IB",
        expected_bandwidth="per port: 100, 200 or 400 Gbit/s Ethernet",
        source=f"{_NCCL_ENV}#nccl-net; {_NCCL_ENV}#nccl-ib-gid-index",
        pod=_SHARED,
    ),
    Fabric(
        # Up to 1.11 the plugin's only network name was "AWS Libfabric"; later versions accept both names, so the old
        # name works with every version.
        name="efa",
        description="AWS Elastic Fabric Adapter through libfabric and the image's aws-ofi-nccl plugin.",
        env=MappingProxyType({"NCCL_NET": "AWS Libfabric", "FI_PROVIDER": "efa"}),
        network="AWS Libfabric",
        expected_bandwidth="per node: p4d 400, p5 3200 Gbit/s",
        source="https://github.com/aws/aws-ofi-nccl/pull/530; "
        "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html; "
        "https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html",
        # libfabric's EFA provider allocates its buffers in huge pages, which a container must request. A machine has
        # 1 to 32 adapters, depending on its type; a job that requests fewer wastes bandwidth.
        pod=PodAccess(resource="vpc.amazonaws.com/efa", huge_pages="5120Mi"),
    ),
    Fabric(
        name="rdma-shared",
        description="InfiniBand or RoCE adapters shared by pods, from the RDMA shared device plugin.",
        env=MappingProxyType({"NCCL_NET": "IB"}),
        network="IB",
        expected_bandwidth="per port: that of the adapter, shared by the pods on its machine",
        source="https://github.com/Mellanox/k8s-rdma-shared-dev-plugin",
        pod=replace(_SHARED, resource="rdma/hca_shared_devices_a"),
    ),
    Fabric(
        name="sriov",
        description="InfiniBand or RoCE virtual functions per pod, each attached by Multus.",
        env=MappingProxyType({"NCCL_NET": "IB"}),
        network="IB",
        expected_bandwidth="per function: its share of the adapter's port",
        source="https://github.com/k8snetworkplumbingwg/sriov-network-device-plugin",
        pod=PodAccess(per_node=1, multus_attached=True, capabilities=("IPC_LOCK",)),
    ),
    Fabric(
        # As published for bare-metal shapes on their host network; the adapter names are those of BM.GPU.H100.8.
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
"""All fabrics by name."""

NAMES: tuple[str, ...] = (AUTO, *CATALOG)
"""Valid values of a job's fabric."""


def resolve(job_fabric: str, target_fabric: str | None) -> Fabric:
    """The fabric of a run: the job's, for `auto` the target's, else that of one machine.

    Raises KeyError for a name that is not in the catalogue; jobs and targets are validated earlier.
    """
    name = job_fabric if job_fabric != AUTO else target_fabric or LOCAL_DEFAULT
    return CATALOG[LOCAL_DEFAULT if name == AUTO else name]
