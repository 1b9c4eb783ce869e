"""Checks of ACS on PCIe switches and of the IOMMU."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from tests.preflight.conftest import MakeNode, codes
from tests.preflight.rdma_nodes import h100_files, rdma_node

from holdfast.preflight.checks import pcie
from holdfast.preflight.node_view import NodeView, NotLookedAt

RECORDED = (Path(__file__).parents[1] / "data/plx8749_downstream_port.txt").read_text()
EXTENDED = {
    "Device Serial Number": 3,
    "Advanced Error Reporting": 1,
    "Power Budgeting <?>": 4,
    "#19": 0x19,
    "Virtual Channel": 2,
    "#12": 0x12,
    "Access Control Services": 0xD,
    "Vendor Specific Information": 0xB,
}
"""Numbers of the extended capabilities that lspci names."""
ACS_BITS = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans")
SWITCH, GPU, ADAPTER = "0000:19:00.0", "0000:1b:00.0", "0000:1c:00.0"
ROOT_PORT = "sys/devices/pci0000:18/0000:18:01.0"


def downstream_port(control: str | None = None) -> bytearray:
    """The configuration of the recorded port: its bytes, and those of the decoded list past 256; ACSCtl if given."""
    config = bytearray(4096)
    for at, line in re.findall(r"^([0-9a-f]{2}): (.*)$", RECORDED, re.MULTILINE):
        config[int(at, 16) : int(at, 16) + 16] = bytes.fromhex(line)
    listed = [(int(at, 16), name) for at, name in re.findall(r"\[([0-9a-f]{3}) v1\] (.*)", RECORDED)]
    for (at, name), (after, _) in zip(listed, [*listed[1:], (0, "")], strict=True):
        number = next(value for text, value in EXTENDED.items() if name.startswith(text))
        struct.pack_into("<I", config, at, number | 1 << 16 | after << 20)
    recorded = re.search(r"ACSCtl: (.*)", RECORDED)
    assert recorded
    struct.pack_into(
        "<H",
        config,
        0xF24 + 6,
        sum(1 << bit for bit, name in enumerate(ACS_BITS) if f"{name}+" in (control or recorded[1])),
    )
    return config


def gpu_node(node: MakeNode, config: bytes | bytearray, *, gpus: int = 8) -> NodeView:
    """A GPU and an adapter, each below a port of one switch."""
    files = h100_files() | {
        f"{ROOT_PORT}/config": "",
        f"{ROOT_PORT}/{SWITCH}/config": "",
        f"{ROOT_PORT}/{SWITCH}/0000:1a:00.0/config": "",
        f"{ROOT_PORT}/{SWITCH}/0000:1a:01.0/config": "",
        f"{ROOT_PORT}/{SWITCH}/0000:1a:00.0/{GPU}/class": "0x030200",
        f"{ROOT_PORT}/{SWITCH}/0000:1a:00.0/{GPU}/vendor": "0x10de",
        f"{ROOT_PORT}/{SWITCH}/0000:1a:01.0/{ADAPTER}/class": "0x020700",
    }
    view = rdma_node(node, files, gpus=gpus, env={"NCCL_IB_HCA": "=mlx5_0"})
    for path in (view.root / ROOT_PORT).rglob("config"):
        path.write_bytes(config)
    (view.root / "sys/bus/pci/devices").mkdir(parents=True)
    (view.root / f"sys/bus/pci/devices/{GPU}").symlink_to(view.root / f"{ROOT_PORT}/{SWITCH}/0000:1a:00.0/{GPU}")
    device = view.root / "sys/class/infiniband/mlx5_0/device"
    (device / "driver").unlink()
    device.rmdir()
    device.symlink_to(view.root / f"{ROOT_PORT}/{SWITCH}/0000:1a:01.0/{ADAPTER}")
    return view


def test_switch_that_redirects(node: MakeNode) -> None:
    found = [*pcie.pcie_acs(gpu_node(node, downstream_port()))]
    assert codes(found) == ["pcie-acs-enabled"]
    assert "0000:1a:00.0: ACS redirects, above 0000:1b:00.0" in found[0].evidence
    assert "0000:1a:01.0: ACS redirects, above mlx5_0" in found[0].evidence


@pytest.mark.parametrize("control", ["SrcValid-", "SrcValid+"])
def test_switch_that_does_not_redirect_passes(node: MakeNode, control: str) -> None:
    assert codes([*pcie.pcie_acs(gpu_node(node, downstream_port(control)))]) == []


def test_root_port_may_redirect(node: MakeNode) -> None:
    config = downstream_port()
    config[0x6A] = 0x42  # Express (v2) Root Port
    assert codes([*pcie.pcie_acs(gpu_node(node, config))]) == []


@pytest.mark.parametrize("size", [256, 4096])
def test_port_without_capability_passes(node: MakeNode, size: int) -> None:
    config = downstream_port()[:size]
    config[256:] = bytes(size - 256)
    assert codes([*pcie.pcie_acs(gpu_node(node, config))]) == []


def test_damaged_list_of_capabilities_ends(node: MakeNode) -> None:
    config = downstream_port()
    struct.pack_into("<I", config, 0xFB4, 1 | 1 << 16 | 0x100 << 20)
    assert codes([*pcie.pcie_acs(gpu_node(node, config))]) == []


def test_configuration_needs_root(node: MakeNode) -> None:
    with pytest.raises(NotLookedAt, match="its PCIe configuration past 64 bytes needs root"):
        [*pcie.pcie_acs(gpu_node(node, downstream_port()[:64]))]


def test_gpus_that_the_bus_does_not_show_are_no_pass(node: MakeNode) -> None:
    with pytest.raises(NotLookedAt, match="/sys/bus/pci/devices shows no GPU"):
        [*pcie.pcie_acs(rdma_node(node, h100_files(), gpus=8))]


def test_node_without_gpus_or_rdma_needs_nothing(node: MakeNode) -> None:
    view = gpu_node(node, downstream_port(), gpus=0)
    assert codes([*pcie.pcie_acs(view), *pcie.iommu(view)]) == []
    assert codes([*pcie.pcie_acs(node(gpus=8)), *pcie.iommu(node(gpus=8))]) == []


IOMMU = {"sys/class/iommu/dmar0/intel-iommu/version": "1:0", "proc/cpuinfo": "flags\t\t: fpu vme vmx"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/cmdline": "ro quiet intel_iommu=on"}, ["iommu-translates"]),
        ({"proc/cmdline": "ro intel_iommu=on iommu=pt"}, []),
        ({"proc/cmdline": "ro iommu.passthrough=1"}, []),
        ({"proc/cmdline": "ro", "proc/cpuinfo": "flags\t\t: fpu vme hypervisor"}, []),
        ({"proc/cmdline": "ro", "sys/class/dmi/id/sys_vendor": "Google"}, []),
        ({"proc/cmdline": "ro", "sys/class/infiniband/mlx5_0/device/iommu_group/type": "identity"}, []),
        (
            {"proc/cmdline": "ro iommu=pt", "sys/class/infiniband/mlx5_0/device/iommu_group/type": "DMA-FQ"},
            ["iommu-translates"],
        ),
    ],
)
def test_iommu(node: MakeNode, files: dict[str, str], expected: list[str]) -> None:
    assert codes([*pcie.iommu(rdma_node(node, h100_files() | IOMMU | files, gpus=8))]) == expected


def test_node_without_iommu_passes(node: MakeNode) -> None:
    assert codes([*pcie.iommu(rdma_node(node, h100_files(), gpus=8))]) == []


def test_iommu_without_command_line_is_no_pass(node: MakeNode) -> None:
    with pytest.raises(NotLookedAt, match="/proc/cmdline"):
        [*pcie.iommu(rdma_node(node, h100_files() | IOMMU, gpus=8))]
