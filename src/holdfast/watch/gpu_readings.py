"""Judges the GPUs of a node by two readings of their state, from NVML or from a DCGM exporter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from holdfast.events import DeviceFault
from holdfast.watch.kernel_faults import Classify, fault_symptom
from holdfast.watch.monitor import Symptom

SLOWDOWNS: Mapping[int, str] = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}
"""Reasons for low clocks that no healthy GPU has for long, by NVML's bits; the limit of power is not one of them."""
SLOW_READINGS = 3
"""Readings in a row in which a GPU is slowed: 15 s."""
MAX_PCIE_REPLAYS = 8
"""Of one reading: DCGM's limit for a minute (dcgm_gpu_hardware_limits.h)."""
MAX_NVLINK_RETRIES_S = 100.0
"""CRC errors and replays of a GPU's links in a second, DCGM's limit (ibid.)."""


class GpuState(Struct, frozen=True, kw_only=True):
    """One GPU; None where the driver gives no value."""

    failure: DeviceFault | None = None
    """Whether the GPU is lost, or needs a reset."""
    error: str = ""
    """The driver's words about it."""
    utilisation: int | None = None
    """Per cent."""
    power_w: float | None = None
    temperature_c: int | None = None
    slowdowns: int = 0
    """Bits of active reasons for low clocks."""
    uncorrectable: int | None = None
    """Memory errors that ECC could not correct, since the driver loaded."""
    repair_pending: bool = False
    """Whether rows or pages of memory are taken out of use at the next reset."""
    repair_failed: bool = False
    """Whether it has no spare rows left."""
    nvlink_recoveries: int | None = None
    nvlink_retries: int | None = None
    """CRC errors and replays of all links."""
    pcie_replays: int | None = None
    xid: int = 0
    """The last Xid, as far as the source has one."""

    def describe(self) -> str:
        """Its load, in words."""
        figures = ((self.utilisation, "% busy"), (self.power_w, " W"), (self.temperature_c, " °C"))
        return ", ".join(f"{value:.0f}{unit}" for value, unit in figures if value is not None)


class GpuReading(Struct, frozen=True, kw_only=True):
    """The GPUs of a node at one time."""

    at_s: float
    gpus: Mapping[str, GpuState]
    """By name, such as `GPU 0000:1b:00`."""


def gpu_symptoms(before: GpuReading, now: GpuReading, classify: Classify) -> Iterator[Symptom]:
    """What the latest reading shows."""
    for name, gpu in now.gpus.items():
        earlier = before.gpus.get(name, gpu)
        yield from _failures(name, earlier, gpu, classify)
        yield from _warnings(name, earlier, gpu, now.at_s - before.at_s)


def _failures(name: str, before: GpuState, now: GpuState, classify: Classify) -> Iterator[Symptom]:
    if now.failure is not None and before.failure is None:
        yield _symptom(
            now.failure.value,
            name,
            f"{name} does not answer its driver: {now.error}",
            "Nothing for the run: it replaces the node. Power-cycle the machine; if it fails again, replace the GPU.",
            now.failure,
        )
    if now.repair_failed and not before.repair_failed:
        yield _symptom(
            DeviceFault.GPU.value,
            name,
            f"{name} could not take a bad row of its memory out of use: it has no spare rows left",
            "Nothing for the run: it replaces the node. Have the GPU replaced.",
            DeviceFault.GPU,
        )
    # Most of these are contained: they end the one program that reads the data. If it is a rank of the run, its error
    # says more than this counter, and decides.
    if count := _growth(before.uncorrectable, now.uncorrectable):
        yield _symptom(
            DeviceFault.CONTAINED.value,
            name,
            f"{name} had {count} memory error{'s' if count > 1 else ''} that ECC could not correct",
            "Reset the GPU at the next pause; if it happens again, have the GPU replaced.",
            DeviceFault.CONTAINED,
        )
    if now.xid and now.xid != before.xid:
        line = f"NVRM: Xid (PCI:{name.removeprefix('GPU ')}): {now.xid}, by the DCGM exporter"
        if (fault := classify(line)) is not None:
            yield fault_symptom(fault, line)


def _warnings(name: str, before: GpuState, now: GpuState, elapsed_s: float) -> Iterator[Symptom]:
    if now.repair_pending and not before.repair_pending:
        yield _symptom(
            "gpu-repair-pending",
            name,
            f"{name} found bad rows in its memory, and takes them out of use at its next reset",
            "Reset the GPU between two jobs: `nvidia-smi --gpu-reset -i N`.",
        )
    reasons = [text for bit, text in SLOWDOWNS.items() if now.slowdowns & bit]
    if reasons:
        state = now.describe()
        yield _symptom(
            "gpu-throttled",
            name,
            f"{name} lowers its clocks: {', '.join(reasons)}{f' ({state})' if state else ''}",
            "Every rank waits for the slowest GPU. Check the node's cooling, fans and power supplies.",
            readings=SLOW_READINGS,
        )
    recoveries = _growth(before.nvlink_recoveries, now.nvlink_recoveries)
    retries = _growth(before.nvlink_retries, now.nvlink_retries)
    if recoveries or retries > MAX_NVLINK_RETRIES_S * max(elapsed_s, 1.0):
        yield _symptom(
            "nvlink-errors",
            name,
            f"the NVLinks of {name} had {recoveries:,} recoveries and {retries:,} retries in {elapsed_s:.0f} s",
            "`nvidia-smi nvlink -e` names the link. Reset the node's GPUs at the next pause; again: have it replaced.",
        )
    if (replays := _growth(before.pcie_replays, now.pcie_replays)) >= MAX_PCIE_REPLAYS:
        yield _symptom(
            "gpu-pcie-errors",
            name,
            f"{name} repeated {replays:,} PCIe packets in {elapsed_s:.0f} s",
            "Reseat the GPU or its riser; `dmesg | grep -i aer` shows the side that fails.",
            readings=2,
        )


def _symptom(
    code: str, name: str, what: str, remedy: str, fault: DeviceFault | None = None, readings: int = 1
) -> Symptom:
    return Symptom(code=code, device=name, what=what, remedy=remedy, fault=fault, readings=readings)


def _growth(before: int | None, now: int | None) -> int:
    """By how much a counter has grown; 0 if it is unknown or was reset."""
    return max(0, now - before) if before is not None and now is not None else 0
