"""Explains the NVIDIA driver's Xid and SXid numbers: what is at fault, and what to do with the GPU.

It covers those that end or slow a training run. The driver writes them to the kernel log. A long file, because it is
one table.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct

from holdfast.diagnose.knowledge.explanation import Explanation
from holdfast.events import DeviceFault

CATALOG = "NVIDIA, Xid catalogue: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
FABRIC_MANAGER = "NVIDIA, Fabric Manager user guide, SXid errors: https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/"


class XidOrigin(StrEnum):
    """What is most likely at fault behind an Xid."""

    APPLICATION = "application"
    DRIVER = "driver"
    HARDWARE = "hardware"
    SECONDARY = "follows another error"
    """Never the first cause: the Xid before it is."""
    HARMLESS = "nothing is wrong"


class Xid(Struct, frozen=True):
    """One number of the driver."""

    number: int
    title: str
    origin: XidOrigin
    cause: str
    remedy: str
    fault: DeviceFault | None = None
    """What it says of the GPU when a rank has failed; None for a fault of the program, a consequence, or no fault."""


_DEBUG = "Run that rank under `compute-sanitizer`, or with CUDA_LAUNCH_BLOCKING=1, to find the kernel."
_RESET = "End what uses the GPU, then `nvidia-smi --gpu-reset -i N`; if it comes again, reboot, then replace the GPU."
_REPLACE = "Take the node out of use and have the GPU replaced."
_NVLINK5 = "Do what the accompanying Xid 154 requests; without one restart the job. On the same link again: replace."

XIDS: tuple[Xid, ...] = (
    Xid(
        8,
        "GPU stopped processing",
        XidOrigin.APPLICATION,
        "A kernel ran longer than the driver's timeout.",
        _DEBUG,
        DeviceFault.UNCLEAR,
    ),
    Xid(
        13,
        "Graphics engine exception",
        XidOrigin.APPLICATION,
        "A kernel did an illegal operation: an index out of bounds, an illegal instruction. Rarely a bad GPU.",
        f"{_DEBUG} Always the same GPU with different programs: test the GPU with `dcgmi diag -r 3`.",
    ),
    Xid(
        31,
        "GPU memory page fault",
        XidOrigin.APPLICATION,
        "A kernel accessed an unmapped address: an index out of bounds, memory used after it was freed.",
        f"{_DEBUG} Always the same GPU with different programs: test the GPU with `dcgmi diag -r 3`.",
    ),
    Xid(
        32,
        "Invalid or corrupted push buffer stream",
        XidOrigin.DRIVER,
        "The GPU's command stream was corrupted, by the driver or on PCIe.",
        "Restart the job; if it comes again, update the driver and check PCIe errors (`dmesg | grep -i aer`).",
        DeviceFault.UNCLEAR,
    ),
    Xid(
        38,
        "Driver firmware error",
        XidOrigin.DRIVER,
        "The GPU's firmware failed.",
        "Update the driver; report it to NVIDIA.",
        DeviceFault.RESET,
    ),
    Xid(
        43,
        "GPU stopped processing",
        XidOrigin.SECONDARY,
        "The driver ended a program's channel after a fault of that program; the GPU itself is healthy.",
        "Check the Xid before it and the program's own error.",
    ),
    Xid(
        45,
        "Preemptive cleanup, due to previous errors",
        XidOrigin.SECONDARY,
        "The driver removed a program's GPU resources: it was killed, or another Xid came first.",
        "Check the Xid before it; alone it only shows that the program ended.",
    ),
    Xid(46, "GPU stopped processing", XidOrigin.HARDWARE, "The GPU did not answer in time.", _RESET, DeviceFault.RESET),
    Xid(
        48,
        "Double bit ECC error",
        XidOrigin.HARDWARE,
        "Memory of the GPU returned data that ECC could not correct.",
        f"Drain the node. {_RESET} With Xid 64, or `SRAM Threshold Exceeded: Yes` in `nvidia-smi -q -d ECC`: replace.",
        DeviceFault.MEMORY,
    ),
    Xid(
        61,
        "Internal micro-controller breakpoint or warning",
        XidOrigin.DRIVER,
        "The GPU's own controller stopped.",
        _RESET,
        DeviceFault.RESET,
    ),
    Xid(
        62,
        "Internal micro-controller halt",
        XidOrigin.HARDWARE,
        "The GPU's own controller halted.",
        _RESET,
        DeviceFault.RESET,
    ),
    Xid(
        63,
        "GPU memory remapping event",
        XidOrigin.HARMLESS,
        "A bad row of memory was recorded and will be remapped at the next reset.",
        "Nothing now; reset the GPU between jobs so that the remapping takes effect.",
    ),
    Xid(
        64,
        "GPU memory remapping failure",
        XidOrigin.HARDWARE,
        "A bad row of memory could not be remapped: no spare rows are left.",
        _REPLACE,
        DeviceFault.GPU,
    ),
    Xid(
        68,
        "Video processor exception",
        XidOrigin.HARDWARE,
        "The video decoder failed.",
        "Restart the job; update the driver.",
        DeviceFault.UNCLEAR,
    ),
    Xid(
        69,
        "Graphics engine class error",
        XidOrigin.APPLICATION,
        "A program sent the GPU an unknown command.",
        f"Check that CUDA, driver and GPU are compatible. {_DEBUG}",
    ),
    Xid(
        74,
        "NVLink error",
        XidOrigin.HARDWARE,
        "A link between GPUs, or to an NVSwitch, failed: a connector, a bridge, a board, or the GPU at its other end.",
        "`nvidia-smi nvlink -e` shows which link. Reset both GPUs or reboot; on the same link again: replace.",
        DeviceFault.NVLINK,
    ),
    Xid(
        79,
        "GPU has fallen off the bus",
        XidOrigin.HARDWARE,
        "The machine cannot reach the GPU over PCIe any more: power, heat, a riser or slot, or the GPU itself.",
        "Take the node out of use and power-cycle it (a warm reboot is often not enough); if it comes again, replace.",
        DeviceFault.GPU,
    ),
    Xid(
        92,
        "High single-bit ECC error rate",
        XidOrigin.HARDWARE,
        "Memory has many errors that ECC still corrects.",
        "Nothing now; watch for 48, 63 and 64.",
    ),
    Xid(
        94,
        "Contained memory error",
        XidOrigin.HARDWARE,
        "An uncorrectable memory error; it affects only the program that used that memory.",
        "Restart the job. Reset the GPU at the next pause so that the row is remapped.",
        DeviceFault.CONTAINED,
    ),
    Xid(
        95,
        "Uncontained memory error",
        XidOrigin.HARDWARE,
        "An uncorrectable memory error that may have damaged every program on the GPU.",
        f"Drain the node. {_RESET}",
        DeviceFault.MEMORY,
    ),
    Xid(
        109,
        "Context switch timeout",
        XidOrigin.DRIVER,
        "The driver could not remove a program from the GPU in time.",
        _RESET,
        DeviceFault.RESET,
    ),
    Xid(
        110,
        "Security fault",
        XidOrigin.HARDWARE,
        "The GPU's memory protection refused an access.",
        _RESET,
        DeviceFault.RESET,
    ),
    Xid(
        119,
        "GSP RPC timeout",
        XidOrigin.DRIVER,
        "The GPU's system processor (GSP) did not answer the driver.",
        "Reset the GPU or reboot; update the driver. If it comes again and the driver allows it, switch GSP off "
        "(`options nvidia NVreg_EnableGpuFirmware=0`).",
        DeviceFault.RESET,
    ),
    Xid(
        120,
        "GSP error",
        XidOrigin.DRIVER,
        "The GPU's system processor (GSP) failed.",
        "Reset the GPU or reboot; update the driver.",
        DeviceFault.RESET,
    ),
    Xid(
        121,
        "C2C link error",
        XidOrigin.HARDWARE,
        "The link between CPU and GPU of a superchip had an error that was corrected.",
        "Reset at the next pause; often again: replace.",
        DeviceFault.CONTAINED,
    ),
    Xid(
        136,
        "NVLink training failed",
        XidOrigin.HARDWARE,
        "A link between GPUs did not come up.",
        _RESET,
        DeviceFault.NVLINK,
    ),
    Xid(
        137,
        "NVLink privilege error",
        XidOrigin.APPLICATION,
        "A program accessed another GPU's memory without permission; not a bad link.",
        f"Look for the first error on the other GPU. {_DEBUG}",
    ),
    Xid(
        140,
        "Unrecovered ECC error",
        XidOrigin.HARDWARE,
        "Memory returned unrecoverable data.",
        _RESET,
        DeviceFault.MEMORY,
    ),
    Xid(
        143,
        "GPU initialisation failure",
        XidOrigin.HARDWARE,
        "The GPU could not be initialised.",
        _RESET,
        DeviceFault.RESET,
    ),
    *(
        Xid(
            number,
            f"NVLink: {unit} error",
            XidOrigin.HARDWARE,
            "A link between GPUs of the Blackwell generation reported an error; the line says fatal or nonfatal, and "
            "which link.",
            _NVLINK5,
            DeviceFault.NVLINK,
        )
        for number, unit in ((144, "SAW"), (145, "RLW"), (146, "TLW"), (147, "TREX"), (148, "NVLPW_CTRL"))
    ),
    Xid(
        149,
        "NVLink: NETIR error",
        XidOrigin.HARDWARE,
        "A link between Blackwell GPUs reported an error.",
        _NVLINK5,
        DeviceFault.NVLINK,
    ),
    Xid(
        150,
        "NVLink: MSE error",
        XidOrigin.HARDWARE,
        "A link between Blackwell GPUs reported an error.",
        _NVLINK5,
        DeviceFault.NVLINK,
    ),
    Xid(
        154,
        "GPU recovery action changed",
        XidOrigin.SECONDARY,
        "The driver reports the recovery that the previous Xid requires: drain, a GPU reset or a reboot of the node.",
        "Do what the brackets in the line request, such as (Node Reboot Required).",
        DeviceFault.RESET,
    ),
    Xid(
        155,
        "NVLink: software-defined error",
        XidOrigin.DRIVER,
        "A link was taken down, on purpose or not.",
        _RESET,
        DeviceFault.NVLINK,
    ),
    Xid(
        156,
        "Resource retirement event",
        XidOrigin.HARMLESS,
        "A bad part of the GPU will be replaced by a spare one at the next reset.",
        "Reset the GPU between jobs.",
    ),
    Xid(
        157,
        "Resource retirement failure",
        XidOrigin.HARDWARE,
        "A bad part of the GPU could not be replaced: no spare is left.",
        _REPLACE,
        DeviceFault.GPU,
    ),
    Xid(
        158,
        "GPU fatal timeout",
        XidOrigin.HARDWARE,
        "The GPU did not answer in time, and cannot continue.",
        _RESET,
        DeviceFault.RESET,
    ),
    Xid(
        171,
        "Uncorrectable DRAM error",
        XidOrigin.HARDWARE,
        "It qualifies the accompanying Xid 48: the error was in the GPU's main memory.",
        "Reset the GPU so that the row is remapped; with Xid 64: replace.",
        DeviceFault.MEMORY,
    ),
    Xid(
        172,
        "Uncorrectable SRAM error",
        XidOrigin.HARDWARE,
        "It qualifies the accompanying Xid 48: the error was in a cache or register file.",
        "`nvidia-smi -q -d ECC`: with `SRAM Threshold Exceeded: Yes` replace the GPU, else reset it.",
        DeviceFault.MEMORY,
    ),
)

SXIDS: tuple[Xid, ...] = (
    Xid(
        10004,
        "NVSwitch thermal event",
        XidOrigin.HARDWARE,
        "The switch is too hot and slows down.",
        "Check fans, air and the power limit of the node.",
    ),
    Xid(
        11004,
        "Ingress invalid ACL",
        XidOrigin.DRIVER,
        "A GPU sent to one that it may not reach: the Fabric Manager's partitions are wrong.",
        "Check the Fabric Manager's partitions, restart `nvidia-fabricmanager`.",
    ),
    Xid(
        12028,
        "Egress non-posted PRIV error",
        XidOrigin.SECONDARY,
        "A GPU at the switch's port answered with an error; that GPU's Xid names it.",
        "Check the GPU's own Xid first.",
    ),
    Xid(
        19084,
        "AN1 heartbeat timeout",
        XidOrigin.SECONDARY,
        "The other end of a link went silent: its GPU was reset or has fallen off.",
        "Look for Xid 79 or a reset of the GPU at that link.",
    ),
    Xid(
        20001,
        "TX replay error",
        XidOrigin.HARDWARE,
        "A link retransmitted a packet; it got through.",
        "Nothing, if rare; often on one link: reseat or replace.",
    ),
    Xid(
        20009,
        "RX short error rate",
        XidOrigin.HARDWARE,
        "A link delivered more damaged packets than usual; they were sent again.",
        "Nothing, if rare; often on one link: reset the GPUs of the node, then reseat or replace.",
    ),
    Xid(
        20034,
        "LTSSM fault up",
        XidOrigin.HARDWARE,
        "A link between GPU and switch went down while in use; jobs on its GPUs fail.",
        "Reset the GPUs of the node or reboot; on the same link again: replace the GPU or the board.",
    ),
    Xid(
        24007,
        "Source track timeout",
        XidOrigin.HARDWARE,
        "A request through the switch was never answered.",
        "Look for the Xid of the GPU that did not answer; reset the GPUs of the node.",
    ),
)

_WHERE = (
    "`dmesg -T | grep -i xid` on that node; the brackets name the GPU's PCI address (`nvidia-smi -q | grep -i bus`)."
)
_WHERE_SWITCH = "`dmesg -T | grep -i sxid` on that node; the line itself says Fatal or Non-fatal, and which link."


def rows() -> Iterator[Explanation]:
    """Every number, as `XID-79` and `SXID-20034`."""
    for prefix, table, where, source in (
        ("XID", XIDS, _WHERE, CATALOG),
        ("SXID", SXIDS, _WHERE_SWITCH, FABRIC_MANAGER),
    ):
        for one in table:
            yield Explanation(
                code=f"{prefix}-{one.number}",
                title=one.title,
                cause=f"{one.cause} ({one.origin})",
                confirm=where,
                remedy=one.remedy,
                source=source,
            )
