"""Why NCCL does not use the fabric: a row for each cause, with the lines that show it and what to do.

A cause of `sockets` explains a fallback, one of `failure` why nodes cannot connect at all, and one of `host-memory` why
NICs do not reach GPU memory. Of several causes of one effect the first row counts.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from enum import StrEnum
from functools import cache

from msgspec import Struct, field

from holdfast.diagnose.nccl_transport.transport_report import LogLine, NcclProcess


class Effect(StrEnum):
    """What NCCL does because of a cause."""

    SOCKETS = "sockets"
    FAILURE = "failure"
    HOST_MEMORY = "host-memory"


class Cause(Struct, frozen=True, kw_only=True):
    """One cause."""

    name: str
    """The variable that causes it, or two words; events carry it."""
    effect: Effect
    phrase: str
    remedy: str
    values: frozenset[str] = frozenset()
    """Values of the variable that cause it, in small letters; empty for any but 0 and nothing."""
    matches: Mapping[bytes, str] = field(default_factory=dict[bytes, str])
    """Patterns searched in a warning, or in a message that begins with `Call to`, each with a line that it matches."""
    shown_by: tuple[str, ...] = ()
    """The lines that show it together, by their names, the quoted one first; its own name if empty."""


_DEVICES = (
    "request the device resource (such as rdma/hca: 1), mount /dev/infiniband, and add IPC_LOCK. With EFA or TCPX "
    "instead, the image lacks the network plugin."
)
_PEER_MEMORY = "`modprobe nvidia_peermem` on the node, or a kernel (5.12) and an open GPU driver (515) with DMA-BUF."

CAUSES: tuple[Cause, ...] = (
    Cause(
        name="NCCL_IB_DISABLE",
        effect=Effect.SOCKETS,
        phrase="NCCL_IB_DISABLE is set",
        remedy="Unset NCCL_IB_DISABLE.",
    ),
    Cause(
        name="NCCL_NET",
        effect=Effect.SOCKETS,
        phrase="NCCL_NET=Socket is set",
        remedy="Unset NCCL_NET, or set it to the fabric's network.",
        values=frozenset({"socket"}),
    ),
    Cause(
        name="no libibverbs",
        effect=Effect.SOCKETS,
        phrase="the image has no libibverbs",
        remedy="Install libibverbs1 and ibverbs-providers in the image.",
        matches={
            rb"Failed to open libibverbs": "ml3:32632:32662 [0] misc/ibvwrap.cu:63 NCCL WARN Failed to open libibverbs.so[.1]",
        },
    ),
    Cause(
        name="old libibverbs",
        effect=Effect.SOCKETS,
        phrase="the image's libibverbs lacks a function that NCCL needs",
        remedy="Install a newer libibverbs1 and ibverbs-providers (rdma-core) in the image.",
        matches={
            rb"dlvsym failed on ibv_": "n1:8:9 [0] misc/ibvsymbols.cc:40 NCCL WARN dlvsym failed on ibv_reg_mr - /lib/libibverbs.so.1: undefined symbol: ibv_reg_mr version IBVERBS_1.1",
        },
    ),
    Cause(
        name="no provider",
        effect=Effect.SOCKETS,
        phrase="libibverbs has no driver (provider) for the node's RDMA device",
        remedy="Install ibverbs-providers in the image, of the same release as its libibverbs1 (libmlx5 for NVIDIA's "
        "NICs); `ibv_devinfo` in the container then lists the devices.",
        shown_by=("no provider", "no device"),
    ),
    Cause(
        name="device closed",
        effect=Effect.SOCKETS,
        phrase="NCCL cannot open the RDMA device",
        remedy="Give the container /dev/infiniband/uverbs* with read and write access, and a provider that knows the "
        "device (ibverbs-providers).",
        matches={
            rb"NET/IB : Unable to open device": "n1:8:9 [0] transport/net_ib.cc:212 NCCL WARN NET/IB : Unable to open device mlx5_0",
            rb"ibv_open_device failed": "n1:8:9 [0] misc/ibvwrap.cc:95 NCCL WARN Call to ibv_open_device failed",
        },
    ),
    Cause(
        name="NCCL_IB_HCA",
        effect=Effect.SOCKETS,
        phrase="NCCL found no RDMA device, and NCCL_IB_HCA is set",
        remedy="If `ibv_devinfo` lists devices in the container, name them in NCCL_IB_HCA, or unset it; if it lists "
        f"none: {_DEVICES}",
        shown_by=("NCCL_IB_HCA", "no device"),
    ),
    Cause(
        name="no IP interface",
        effect=Effect.SOCKETS,
        phrase="NCCL found no IP interface to set up the RDMA connections over",
        remedy="Give the container an interface with an address (`ip -br addr`), and name it in NCCL_SOCKET_IFNAME.",
        matches={
            rb"NET/IB : No IP interface found": "n1:8:9 [0] transport/net_ib.cc:180 NCCL WARN NET/IB : No IP interface found.",
        },
    ),
    Cause(
        name="no device",
        effect=Effect.SOCKETS,
        phrase="NCCL found no RDMA device",
        remedy=f"No RDMA device was found in the container: {_DEVICES}",
    ),
    Cause(
        name="plugin failed",
        effect=Effect.SOCKETS,
        phrase="the network plugin does not start",
        remedy="Plugin, libfabric and NCCL of one release; `fi_info -p efa` in the container lists the devices that "
        "the plugin needs (vpc.amazonaws.com/efa in the pod).",
        matches={
            rb"NET/OFI (?:aws-ofi-nccl initialization failed|Could not find any|Unexpected group size|Failed to|.{0,40}call failed)": "w-p5:954:3133 [6] nccl_net_ofi_create_plugin:1067 NCCL WARN NET/OFI aws-ofi-nccl initialization failed",
        },
    ),
    Cause(
        name="no plugin",
        effect=Effect.SOCKETS,
        phrase="NCCL found no network plugin",
        remedy="With EFA or TCPX the image lacks the network plugin; with InfiniBand see `ibv_devinfo`.",
    ),
    Cause(
        name="memlock",
        effect=Effect.FAILURE,
        phrase="the limit on locked memory (memlock) is too low",
        remedy="`ulimit -l unlimited` for the ranks: IPC_LOCK in the container's capabilities, `--ulimit memlock=-1`, "
        "LimitMEMLOCK=infinity of the runtime or slurmd.",
        matches={
            rb"ibv_(?:reg_(?:dmabuf_)?mr(?:_iova2?)?|create_\w+|alloc_pd) failed(?: with error (?:12 )?Cannot allocate memory|$)": "n1:8:90 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        },
    ),
    Cause(
        name="peer memory",
        effect=Effect.FAILURE,
        phrase="the NIC cannot register GPU memory (peer memory or DMA-BUF)",
        remedy=f"{_PEER_MEMORY} NCCL_NET_GDR_LEVEL=LOC runs without GPUDirect.",
        matches={
            rb"ibv_reg_(?:dmabuf_)?mr(?:_iova2?)? failed with error (?:\d+ )?(?:Bad address|Invalid argument|(?:Operation|Protocol) not supported)": "n1:8:9 [0] misc/ibvwrap.cc:250 NCCL WARN Call to ibv_reg_dmabuf_mr failed with error Operation not supported",
        },
    ),
    Cause(
        name="GID index",
        effect=Effect.FAILURE,
        phrase="the GID index does not exist on the port, or is of another type than the peer's",
        remedy="Unset NCCL_IB_GID_INDEX (NCCL 2.21 chooses the RoCE v2 GID itself), or set it to the `::ffff:` RoCE v2 "
        "row of `show_gids`, which must be the same on every node.",
        matches={
            rb"ibv_query_gid failed": "n1:8:9 [0] misc/ibvwrap.cc:140 NCCL WARN Call to ibv_query_gid failed with error No such file or directory errno 2",
            rb"ibv_modify_qp failed with (?:error )?(?:\d+ )?(?:Invalid argument|No data available|No such device)": "n1:8:9 [0] misc/ibvwrap.cc:282 NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument, on dev mlx5_0:1, curr state INIT, next state RTR, local GID index 5, local GID ::, remote GID ::ffff:10.0.0.2",
        },
    ),
    Cause(
        name="GID unreachable",
        effect=Effect.FAILURE,
        phrase="the peer's GID cannot be reached",
        remedy="The GIDs of both ends must be routable RoCE v2 GIDs of one network (`show_gids`; NCCL_IB_GID_INDEX), "
        "and rails that are not connected need NCCL_CROSS_NIC=0.",
        matches={
            rb"ibv_modify_qp failed with (?:error )?(?:\d+ )?(?:Connection timed out|No route to host|Network is unreachable|Host is unreachable)": "h1:7:8 [5] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_1:1, curr state INIT, next state RTR, local GID index 3, local GID ::ffff:10.0.0.1, remote GID ::ffff:10.0.1.1",
        },
    ),
    Cause(
        name="link layers",
        effect=Effect.FAILURE,
        phrase="InfiniBand and Ethernet devices were paired",
        remedy="Name the devices of one kind in NCCL_IB_HCA, such as NCCL_IB_HCA=mlx5_0,mlx5_1.",
        matches={
            rb"Attempted to (?:connect|merge) incompatible devices": "n1:8:9 [0] transport/net_ib/connect.cc:90 NCCL WARN NET/IB : Attempted to connect incompatible devices: [0]mlx5_0:1/IB and [1]mlx5_1:1/RoCE. Try selecting NICs of only one link type using NCCL_IB_HCA",
            rb"device is incompatible with the local": "n1:8:9 [0] transport/net_ib/connect.cc:99 NCCL WARN NET/IB : Remote RoCE device is incompatible with the local [0]mlx5_0:1/IB. Try selecting NICs of only one link type using NCCL_IB_HCA",
            rb"multiple devices together with different link_layer": "n1:8:9 [0] transport/net_ib.cc:500 NCCL WARN NET/IB : Trying to merge multiple devices together with different link_layer properties mlx5_0 -> 1, mlx5_1 -> 2. Try only selecting NICs with one type of link using NCCL_IB_HCA",
        },
    ),
    Cause(
        name="no interface",
        effect=Effect.FAILURE,
        phrase="NCCL_SOCKET_IFNAME names no interface of this node",
        remedy="Set NCCL_SOCKET_IFNAME to an interface that the container has (`ip -br addr`).",
        matches={
            rb"no socket interface found": "n1:8:9 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",
            rb"NET/Socket : (?:no interface found|No usable listening interface found)": "n1:8:9 [0] transport/net_socket.cc:80 NCCL WARN NET/Socket : no interface found",
            rb"no device found (?:matching|after excluding) .*, verify NCCL_": "n1:8:9 [0] bootstrap.cc:118 NCCL WARN no device found matching net9, verify NCCL_OOB_NET_IFNAME",
        },
    ),
    Cause(
        name="NCCL_NET_GDR_LEVEL",
        effect=Effect.HOST_MEMORY,
        phrase="NCCL_NET_GDR_LEVEL turns it off",
        remedy="Unset NCCL_NET_GDR_LEVEL, or set it to SYS.",
        values=frozenset({"0", "loc"}),
    ),
    Cause(
        name="refused dma-buf",
        effect=Effect.HOST_MEMORY,
        phrase="the GPU offers DMA-BUF, but the NIC's driver does not take it, and nvidia_peermem is not loaded",
        remedy="`modprobe nvidia_peermem` on the node, or a kernel and rdma-core (34) whose NIC driver has DMA-BUF.",
        shown_by=("gdr disabled", "dma-buf"),
    ),
    Cause(
        name="no peer memory",
        effect=Effect.HOST_MEMORY,
        phrase="the node has neither nvidia_peermem nor DMA-BUF",
        remedy=_PEER_MEMORY,
        shown_by=("gdr disabled",),
    ),
    Cause(
        name="far apart",
        effect=Effect.HOST_MEMORY,
        phrase="GPU and NIC are too far apart on PCIe",
        remedy="NIC and GPU under one PCIe switch, or NCCL_NET_GDR_LEVEL=SYS; the topology must be visible in the "
        "container (/sys, or NCCL_TOPO_FILE in a VM).",
    ),
)
BY_NAME: Mapping[str, Cause] = {cause.name: cause for cause in CAUSES}

# libibverbs: Warning: no userspace device-specific driver found for /sys/class/infiniband_verbs/uverbs1
NO_PROVIDER = re.compile(rb"libibverbs: Warning: no userspace device-specific driver found for[^\n]*")
"""What libibverbs writes to a rank's output. Drivers that it cannot load are often those of devices that are not there."""


@cache
def _patterns() -> re.Pattern[bytes]:
    """All patterns as one, with a group for each row that has any."""
    rows = ((number, b"|".join(cause.matches)) for number, cause in enumerate(CAUSES) if cause.matches)
    return re.compile(b"|".join(b"(?P<c%d>%s)" % row for row in rows))


def named_by(message: bytes) -> str:
    """The cause that a warning names; empty if it names none."""
    found = _patterns().search(message)
    if found is None or found.lastgroup is None or b", retrying " in message:
        return ""
    return CAUSES[int(found.lastgroup[1:])].name


def quoted_line(process: NcclProcess, cause: Cause) -> LogLine | None:
    """The line by which a process shows a cause; None if it does not. A variable set to 0 or to nothing causes none."""
    names, value = cause.shown_by or (cause.name,), process.env.get(cause.name)
    if any(name not in process.evidence for name in names):
        return None
    causes = (value or "").casefold() in cause.values if cause.values else value not in {"", "0"}
    return process.evidence[names[0]] if causes else None


def first_cause(names: Container[str], effect: Effect) -> Cause | None:
    """The first row of this effect whose name is given."""
    return next((cause for cause in CAUSES if cause.effect is effect and cause.name in names), None)
