"""Records of the kernel's log that report failed hardware, as the kernel adds them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from holdfast.events import DeviceFault
from holdfast.watch.monitor import Symptom

Classify = Callable[[str], DeviceFault | None]
"""What a line says of a device; diagnose/device_fault_lines.py knows."""

MAX_LINE_CHARS = 500

# NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
# nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
# mlx5_core 0000:0c:00.0: poll_health:801:(pid 0): Fatal error 1 detected
_GPU = re.compile(r"Xid \(PCI:(?P<address>[0-9A-Fa-f:]+)")
_PCI = re.compile(r"\b(?P<address>[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})\b")


class HostFault(Struct, frozen=True, kw_only=True):
    """A line that reports failed hardware other than a GPU or an adapter."""

    code: str
    pattern: re.Pattern[str]
    what: str
    remedy: str


HOST_FAULTS = (
    HostFault(
        code="host-memory-failed",
        # EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0
        # Memory failure: 0x1f3a2b: Sending SIGBUS to python:1234 due to hardware memory corruption
        pattern=re.compile(r"EDAC \S{1,8}: [1-9]\d* UE |^Memory failure: 0x"),
        what="the node's memory returned data that ECC could not correct",
        remedy="Take the node out of use, and test or replace the memory module that the line names.",
    ),
    HostFault(
        code="host-machine-check",
        # mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: be00000000800400
        pattern=re.compile(r"mce: \[Hardware Error\]: CPU \d+: Machine Check|Machine Check Exception"),
        what="a processor of the node reported a machine check",
        remedy="`mcelog` or `rasdaemon` decodes it. Take the node out of use if it comes again.",
    ),
    HostFault(
        code="host-disk-failed",
        # nvme nvme0: controller is down; will reset: CSTS=0xffffffff
        # nvme nvme0: Device not ready; aborting reset, CSTS=0x1
        pattern=re.compile(r"nvme \S{1,10}: (?:controller is down|Device not ready|Removing after probe failure)"),
        what="a disk of the node stopped answering",
        remedy="Checkpoints and data on that disk may be lost: take the node out of use, and replace the disk.",
    ),
)


def gpu_name(address: str) -> str:
    """A GPU by its PCI address, in the driver's short form: `GPU 0000:1b:00`."""
    domain, _, rest = address.lower().removesuffix(".0").partition(":")
    return f"GPU {domain[-4:].zfill(4)}:{rest}"


def kernel_symptoms(records: Iterable[str], classify: Classify) -> Iterator[Symptom]:
    """What new records report."""
    for record in records:
        if (fault := classify(record)) is not None:
            yield fault_symptom(fault, record)
            continue
        for row in HOST_FAULTS:
            if row.pattern.search(record):
                line = record[:MAX_LINE_CHARS]
                yield Symptom(
                    code=row.code, device="", what=row.what, remedy=row.remedy, evidence=lambda line=line: (line,)
                )


def fault_symptom(fault: DeviceFault, record: str) -> Symptom:
    """A fault of a device that a line reports."""
    line = record.strip()[:MAX_LINE_CHARS]
    if found := _GPU.search(record):
        device = gpu_name(found["address"])
    else:
        found = _PCI.search(record)
        device = found["address"] if found else ""
    return Symptom(
        code=fault.value,
        device=device,
        what=f"the kernel reports a fault of {device or 'a device'}: {line}",
        remedy=f"`holdfast explain {fault.value}` says what follows.",
        evidence=lambda: (line,),
        fault=fault,
    )
