"""The catalogue of fabrics that are the same everywhere; cloud_fabrics.py has those of one provider.

A row makes NCCL fail if the fabric is missing. By default NCCL falls back to TCP with a single log line, and the run
may train ten times slower. Site details (which HCA, which GID index) belong to the job's or the site's `fabric.env`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from holdfast.fabric.cloud_fabrics import CLOUD_FABRICS
from holdfast.fabric.fabric import DeviceClaim, Fabric, PodAccess, Variable
from holdfast.fabric.verbs import NCCL_ENV, SHARED_DEVICES, VERBS

AUTO = "auto"
"""Fabric name that means the target's fabric."""
LOCAL_DEFAULT = "tcp"

_ROWS = (
    Fabric(
        name="tcp",
        description="TCP sockets over any network; works everywhere.",
        variables=(Variable("NCCL_NET", "Socket", "All nodes use sockets, also where some have faster adapters."),),
        network="Socket",
        expected_bandwidth="that of the network card, limited by the copy rate of one core",
        source=f"{NCCL_ENV}#nccl-net",
    ),
    Fabric(
        name="infiniband",
        description="InfiniBand verbs through NCCL's own IB transport.",
        variables=VERBS,
        network="IB",
        expected_bandwidth="per port: HDR 200, NDR 400, XDR 800 Gbit/s",
        port_gbit_s=200,
        source=f"{NCCL_ENV}#nccl-net; https://www.infinibandta.org/infiniband-roadmap",
        pod=SHARED_DEVICES,
    ),
    Fabric(
        # NCCL_IB_GID_INDEX is not set: since 2.21 NCCL finds the RoCE v2 GID itself, and a wrong index is a common
        # misconfiguration.
        name="roce",
        description="RDMA over Ethernet (RoCE v2) through NCCL's own IB transport.",
        variables=VERBS,
        network="IB",
        expected_bandwidth="per port: 100, 200 or 400 Gbit/s Ethernet",
        port_gbit_s=100,
        source=f"{NCCL_ENV}#nccl-net; {NCCL_ENV}#nccl-ib-gid-index",
        pod=SHARED_DEVICES,
    ),
    Fabric(
        name="rdma-shared",
        description="InfiniBand or RoCE adapters shared by pods, from the RDMA shared device plugin.",
        variables=VERBS,
        network="IB",
        expected_bandwidth="per port: that of the adapter, shared by the pods on its machine",
        source="https://github.com/Mellanox/k8s-rdma-shared-dev-plugin",
        pod=replace(SHARED_DEVICES, resource="rdma/hca_shared_devices_a"),
    ),
    Fabric(
        name="macvlan",
        description="RoCE adapters shared by pods, each with a macvlan interface that Multus attaches.",
        variables=VERBS,
        network="IB",
        expected_bandwidth="per port: that of the adapter, shared by the pods on its machine",
        source="https://pkg.go.dev/github.com/Mellanox/k8s-rdma-shared-dev-plugin",
        pod=replace(SHARED_DEVICES, resource="rdma/rdma_shared_device_a", multus_attached=True),
    ),
    Fabric(
        name="sriov",
        description="InfiniBand or RoCE virtual functions per pod, each attached by Multus.",
        variables=VERBS,
        network="IB",
        expected_bandwidth="per function: its share of the adapter's port",
        source="https://github.com/k8snetworkplumbingwg/sriov-network-device-plugin",
        pod=PodAccess(per_node=1, multus_attached=True, capabilities=("IPC_LOCK",)),
    ),
    Fabric(
        # The daemon reads the annotation and the network's P_Key, and has the subnet manager add the pod's GUID to it.
        name="ib-kubernetes",
        description="InfiniBand virtual functions in a partition (P_Key), whose GUIDs ib-kubernetes assigns.",
        variables=VERBS,
        network="IB",
        expected_bandwidth="per function: its share of the adapter's port",
        source="https://github.com/Mellanox/ib-kubernetes",
        pod=PodAccess(per_node=1, multus_attached=True, capabilities=("IPC_LOCK",), deployment="ib-kubernetes"),
    ),
    Fabric(
        name="host-device",
        description="Whole InfiniBand or RoCE adapters, each moved into one pod by Multus.",
        variables=VERBS,
        network="IB",
        expected_bandwidth="per adapter: its line rate",
        source="https://docs.nvidia.com/networking/display/kubernetes2570/quick-start/host-device-rdma.html",
        pod=PodAccess(resource="nvidia.com/hostdev", per_node=1, multus_attached=True, capabilities=("IPC_LOCK",)),
    ),
    Fabric(
        name="dra",
        description="InfiniBand or RoCE adapters that the scheduler allocates by a ResourceClaim (DRA).",
        variables=VERBS,
        network="IB",
        expected_bandwidth="per adapter: its line rate",
        source="https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation; "
        "https://dranet.dev/docs",
        pod=PodAccess(claim=DeviceClaim(), capabilities=("IPC_LOCK",)),
    ),
)

CATALOG: Mapping[str, Fabric] = MappingProxyType({row.name: row for row in (*_ROWS, *CLOUD_FABRICS)})
"""All fabrics by name."""

NAMES: tuple[str, ...] = (AUTO, *CATALOG)
"""Valid values of a job's fabric."""


def resolve(job_fabric: str, target_fabric: str | None) -> Fabric:
    """The fabric of a run: the job's, for `auto` the target's, else that of one machine.

    Raises KeyError for a name that is not in the catalogue; jobs and targets are validated earlier.
    """
    name = job_fabric if job_fabric != AUTO else target_fabric or LOCAL_DEFAULT
    return CATALOG[LOCAL_DEFAULT if name == AUTO else name]
