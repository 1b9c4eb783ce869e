"""The way between GPUs and RDMA adapters on a node's PCIe: access control services, and the IOMMU."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.rdma_devices import DEVICES, needs_rdma, optional, used_ports

PCI_DEVICES = "sys/bus/pci/devices"
GPU_VENDORS = ("0x10de", "0x1002")
GPU_CLASSES = ("0x03", "0x12")
"""Display controllers, and processing accelerators such as AMD's MI300."""
STANDARD_CONFIG_BYTES = 64
"""What Linux lets a process without CAP_SYS_ADMIN read of a device's configuration."""
EXTENDED_CONFIG_BYTES = 256
"""Offset of the extended capabilities."""
MAX_CAPABILITIES = 64
"""More than any device has; a damaged list may lead to itself."""
EXPRESS_CAPABILITY = 0x10
DOWNSTREAM_PORT = 6
"""Type of a port of a PCIe switch below which a device is; a root port (type 4) belongs to the root complex itself."""
ACS_CAPABILITY = 0x000D
ACS_REDIRECT = 0x0004 | 0x0008
"""Bits of the ACS control register, request and completion redirect: packets between peers go to the root complex."""
MAX_EVIDENCE = 8
"""Lines of a finding."""
VIRTUAL_VENDORS = ("QEMU", "Google", "Microsoft Corporation", "VMware", "Xen", "Alibaba Cloud", "OpenStack")
"""`sys_vendor` of machines without the processor flag `hypervisor`, such as those of ARM."""

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")  # 0000:1b:00.0
_PASSTHROUGH = ("iommu=pt", "iommu.passthrough=1", "intel_iommu=off", "amd_iommu=off", "iommu=off")


def pcie_acs(view: NodeView) -> Iterator[Finding]:
    """No PCIe switch above a GPU or an adapter sends packets between them through the processor."""
    if not view.wanted.gpus or not needs_rdma(view.wanted):
        return
    adapters = {port.device: view.root / DEVICES / port.device / "device" for port in used_ports(view).ports}
    gpus = {name: view.root / PCI_DEVICES / name for name in view.list(PCI_DEVICES) if _is_gpu(view, name)}
    if not gpus:
        raise NotLookedAt(f"/{PCI_DEVICES} shows no GPU")
    above: dict[Path, list[str]] = {}
    for name, device in (gpus | adapters).items():
        for bridge in _bridges(device):
            above.setdefault(bridge, []).append(name)
    redirecting = {bridge: names for bridge, names in sorted(above.items()) if _redirects(_config(bridge))}
    if redirecting:
        lines = [f"{bridge.name}: ACS redirects, above {', '.join(names)}" for bridge, names in redirecting.items()]
        yield Finding(
            code="pcie-acs-enabled",
            severity=Severity.WARNING,
            what=f"{len(redirecting)} PCIe switch ports above GPUs or RDMA adapters have ACS redirection enabled: "
            "GPUDirect goes through the processor, which is slow and on some machines hangs",
            where=", ".join(bridge.name for bridge in redirecting),
            evidence=tuple(lines[:MAX_EVIDENCE]),
            remedy="On a machine without virtual machines disable ACS in the BIOS, or for each port after every start: "
            "`setpci -s ADDRESS ECAP_ACS+6.w=0000`. Verify with `lspci -vvv | grep ACSCtl`.",
            owner=Owner.CLUSTER,
        )


def iommu(view: NodeView) -> Iterator[Finding]:
    """On a machine, the IOMMU translates no addresses between adapters and GPUs."""
    if not view.wanted.gpus or not needs_rdma(view.wanted) or not view.list("sys/class/iommu") or _is_virtual(view):
        return
    command_line = view.read("proc/cmdline")
    types = {
        port.device: optional(view, f"{DEVICES}/{port.device}/device/iommu_group/type")
        for port in used_ports(view).ports
    }
    known = {device: text for device, text in types.items() if text}
    translated = [f"{device}: iommu group of type {text}" for device, text in known.items() if text.startswith("DMA")]
    if translated or (not known and not set(_PASSTHROUGH) & set(command_line.split())):
        yield Finding(
            code="iommu-translates",
            severity=Severity.WARNING,
            what="the IOMMU translates the addresses of RDMA adapters: GPUDirect is slower, or fails",
            where="/sys/class/iommu",
            evidence=(f"/proc/cmdline: {command_line}", *translated[:MAX_EVIDENCE]),
            remedy="Start the kernel with `iommu=pt` (`iommu.passthrough=1` on ARM), or disable the IOMMU in the BIOS.",
            owner=Owner.CLUSTER,
        )


def _is_gpu(view: NodeView, name: str) -> bool:
    kind = optional(view, f"{PCI_DEVICES}/{name}/class")
    return kind.startswith(GPU_CLASSES) and optional(view, f"{PCI_DEVICES}/{name}/vendor") in GPU_VENDORS


def _bridges(device: Path) -> list[Path]:
    """The folders of the PCIe bridges above a device, the nearest first."""
    return [folder for folder in device.resolve().parents if _ADDRESS.fullmatch(folder.name)]


def _config(bridge: Path) -> bytes:
    try:
        config = (bridge / "config").read_bytes()
    except OSError as error:
        raise NotLookedAt(f"{bridge.name}: its PCIe configuration: {error.strerror}") from error
    if len(config) <= STANDARD_CONFIG_BYTES:
        raise NotLookedAt(f"{bridge.name}: its PCIe configuration past {STANDARD_CONFIG_BYTES} bytes needs root")
    return config


def _redirects(config: bytes) -> bool:
    """Whether it is that of a switch port that sends packets between peers upwards."""
    express = next((at for number, at in _capabilities(config) if number == EXPRESS_CAPABILITY), None)
    if express is None or _word(config, express + 2) >> 4 & 0xF != DOWNSTREAM_PORT:
        return False
    acs = next((at for number, at in _extended_capabilities(config) if number == ACS_CAPABILITY), None)
    return acs is not None and bool(_word(config, acs + 6) & ACS_REDIRECT)


def _capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """Number and offset of each capability: a list that byte 0x34 begins."""
    at = config[0x34] & 0xFC
    for _ in range(MAX_CAPABILITIES):
        if not at or at + 4 > len(config):
            return
        yield config[at], at
        at = config[at + 1] & 0xFC


def _extended_capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """Number and offset of each extended capability: 16 bits number, 4 bits version, 12 bits offset of the next."""
    at = EXTENDED_CONFIG_BYTES
    for _ in range(MAX_CAPABILITIES):
        if at < EXTENDED_CONFIG_BYTES or at + 8 > len(config):
            return
        (header,) = struct.unpack_from("<I", config, at)
        yield header & 0xFFFF, at
        at = header >> 20


def _word(config: bytes, at: int) -> int:
    (word,) = struct.unpack_from("<H", config, at)
    return word


def _is_virtual(view: NodeView) -> bool:
    """Whether the node is a virtual machine, which sees no IOMMU but a virtual one."""
    flags = next((line for line in view.read("proc/cpuinfo").splitlines() if line.startswith("flags")), "")
    return "hypervisor" in flags.split() or optional(view, "sys/class/dmi/id/sys_vendor").startswith(VIRTUAL_VENDORS)
