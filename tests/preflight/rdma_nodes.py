"""Nodes with RDMA devices: sysfs trees as recorded on real machines."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv6Address
from typing import Any

from tests.preflight.conftest import MakeNode

from holdfast.preflight.node_view import NodeView

UNSET_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def port_files(device: str, verbs: int, **values: str) -> dict[str, str]:
    """Files of a device with one port, and its file in /dev; `values` are attributes of both."""
    folder = f"sys/class/infiniband/{device}"
    attributes = {"state": "4: ACTIVE", "phys_state": "5: LinkUp"} | values
    return {
        **{
            f"{folder}/{name}": attributes.pop(name)
            for name in ("board_id", "fw_ver", "node_type")
            if name in attributes
        },
        **{f"{folder}/ports/1/{name}": text for name, text in attributes.items()},
        f"sys/class/infiniband_verbs/uverbs{verbs}/ibdev": device,
        f"dev/infiniband/uverbs{verbs}": "",
    }


def h100_files() -> dict[str, str]:
    """Eight NDR adapters and a bond for the host's network, as in leptonai/gpud (Apache-2.0).

    components/accelerator/nvidia/infiniband/class/testdata/sys-class-infiniband-h100.0. The rate of the bond and the
    partition keys are not in that copy.
    """
    files = port_files("mlx5_bond_0", 8, link_layer="Ethernet", rate="25 Gb/sec (1X EDR)", board_id="MT_0000000224")
    for number in range(8):
        files |= port_files(
            f"mlx5_{number}",
            number,
            board_id="MT_0000000838",
            fw_ver="28.41.1000",
            node_type="1: CA",
            rate="400 Gb/sec (4X NDR)",
            link_layer="InfiniBand",
            **{"pkeys/0": "0xffff", "pkeys/1": "0x0000"},
        )
    return files


def gid_files(device: str, table: Mapping[int, tuple[str, str]], interface: str, entries: int = 8) -> dict[str, str]:
    """A table of GIDs: index to address and type."""
    folder = f"sys/class/infiniband/{device}/ports/1"
    files = {f"{folder}/gids/{index}": UNSET_GID for index in range(entries)}
    for index, (address, kind) in table.items():
        files[f"{folder}/gids/{index}"] = IPv6Address(address).exploded
        files[f"{folder}/gid_attrs/types/{index}"] = kind
        files[f"{folder}/gid_attrs/ndevs/{index}"] = interface
    return files


def roce_files(first: int = 0, mtu: str = "9000") -> dict[str, str]:
    """Two adapters with the GIDs of https://github.com/NVIDIA/nccl/issues/1131, from index `first` on."""
    files: dict[str, str] = {}
    for device, interface, mac, address in (
        ("mlx5_0", "ens3np0", "fe80::a288:c2ff:fe5b:3ec", "::ffff:11.0.0.72"),
        ("mlx5_1", "ens2np0", "fe80::a288:c2ff:fe5b:374", "::ffff:11.0.0.73"),
    ):
        files |= port_files(
            device,
            int(device[-1]),
            board_id="MT_0000000838",
            fw_ver="28.39.1002",
            node_type="1: CA",
            rate="200 Gb/sec (4X HDR)",
            link_layer="Ethernet",
        )
        table = [(mac, "IB/RoCE v1"), (mac, "RoCE v2"), (address, "IB/RoCE v1"), (address, "RoCE v2")]
        files |= gid_files(device, dict(enumerate(table, first)), interface)
        files[f"sys/class/net/{interface}/mtu"] = mtu
    return files


def efa_files() -> dict[str, str]:
    """Two of the adapters of an EC2 instance, in the words of its `ibv_devinfo`: no board, no known link layer."""
    files: dict[str, str] = {}
    for number, device in enumerate(("rdmap85s0", "rdmap86s0")):
        files |= port_files(
            device,
            number,
            fw_ver="0.0.0.0",
            node_type="7: unspecified",
            rate="100 Gb/sec (4X EDR)",
            link_layer="Unknown",
        )
    return files


def rdma_node(node: MakeNode, files: Mapping[str, str], *, driver: str = "mlx5_core", **fields: Any) -> NodeView:
    """A node of files whose RDMA devices have a driver; the network is IB unless the fields name one."""
    view = node(files, **{"network": "IB"} | fields)
    for device in view.list("sys/class/infiniband"):
        folder = view.root / "sys/class/infiniband" / device / "device"
        folder.mkdir(exist_ok=True)
        (folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
    return view
