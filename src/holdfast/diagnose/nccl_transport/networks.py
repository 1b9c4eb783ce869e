"""The names of NCCL's networks: the kind of fabric of each, and which a job's fabric may use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from msgspec import Struct

from holdfast.fabric.fabric import Fabric


class Network(Struct, frozen=True, kw_only=True):
    """A kind of network that carries connections between nodes."""

    name: str
    """Its label in a matrix."""
    names: str
    """Its name in NCCL: a regular expression for the whole name."""
    remedy: str
    """What to check where it was expected and is missing."""


_VERBS = (
    "The image needs libibverbs1 and ibverbs-providers, the pod /dev/infiniband (a resource such as rdma/hca) and "
    "IPC_LOCK; NCCL_IB_DISABLE and NCCL_NET must not be set against it. `ibv_devinfo` inside the container shows what "
    "NCCL will find."
)

_ROWS = (
    Network(name="TCP", names="Socket", remedy="Unset NCCL_NET, or set NCCL_NET=Socket on every rank."),
    # IBext_v8 and its like are the verbs transport of HPC-X's plugin, gIB that of Google's RoCE machines.
    Network(name="IB", names=r"IB|IBext\w*|gIB", remedy=_VERBS),
    Network(
        name="OFI",
        names=r"(?:AWS )?Libfabric|OFI",
        remedy="The image needs libfabric and aws-ofi-nccl (its library on LD_LIBRARY_PATH, or NCCL_NET_PLUGIN), the "
        "pod vpc.amazonaws.com/efa, and FI_PROVIDER=efa; `fi_info -p efa` in the container shows what NCCL will find.",
    ),
    # GPUDirect-TCPX (A3 High) and TCPXO (A3 Mega, "FasTrak") of Google Cloud: TCP that the NIC puts into GPU memory.
    Network(
        name="TCPX",
        names=r"FasTrak|GPUDirectTCPX\w*|TCPX\w*",
        remedy="The plugin of the machine type must be mounted (NCCL_NET_PLUGIN or LD_LIBRARY_PATH), and its "
        "receiver daemon must run next to the ranks.",
    ),
)

OTHER = Network(name="plugin", names=".+", remedy="Read the plugin's own lines in the log.")

EXPECTED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"tcp": ("TCP", ""), "infiniband": ("IB", "IB"), "roce": ("IB", "RoCE"), "efa": ("OFI", "")}
)
"""For each fabric of the catalogue its network, and the link layer of its devices."""


@lru_cache(1 << 9)
def network_of(name: str) -> Network:
    """The kind of network with this name in NCCL."""
    return next((row for row in _ROWS if re.fullmatch(row.names, name)), OTHER)


def network_by_label(name: str) -> Network:
    """The kind of network with this label in a matrix."""
    return next((row for row in _ROWS if row.name == name), OTHER)


def expected_network(fabric: Fabric) -> tuple[Network, str]:
    """The network of a fabric of the catalogue, and the link layer, empty where it has none."""
    name, layer = EXPECTED.get(fabric.name, (network_of(fabric.network).name, ""))
    return network_by_label(name), layer
