"""The table of monitors: what an agent reads while ranks run, how often, and what judges it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.host.kernel_log import KernelLogTail
from holdfast.host.network_links import NetworkLinks, interface_with, is_hardware
from holdfast.watch import dcgm_exporter, host_load, link_state, memory_pressure, nvml, rdma_ports
from holdfast.watch.gpu_readings import GpuReading, gpu_symptoms
from holdfast.watch.kernel_faults import Classify, kernel_symptoms
from holdfast.watch.monitor import AnyMonitor, Monitor, Polled, SourceMissing, Symptom, comparing

MEMORY, GPUS, RDMA_PORTS = "memory", "GPUs (NVML)", "RDMA ports"
INTERFACES, DISKS, CPU_LIMIT = "network interfaces", "disks", "CPU limit"


class NodePlace(Struct, frozen=True, kw_only=True):
    """The node of the monitors."""

    address: str
    """At which other nodes reach it."""
    classify: Classify
    is_visible: Callable[[int, str], bool]
    """Whether the run may use a GPU, by index and UUID."""
    root: Path = Path("/")
    load_nvml: Callable[[], Any] = nvml.load


def monitors(place: NodePlace) -> tuple[AnyMonitor, ...]:
    """One row for each source; the periods keep all of them together under 0.5 % of a core."""
    root = place.root
    gpu_judge = comparing(partial(gpu_symptoms, classify=place.classify))
    lines_judge = comparing(partial(_line_symptoms, classify=place.classify))
    return (
        Monitor(
            source="kernel log",
            period_s=1.0,
            open=lambda: _kernel_log(root / "dev/kmsg"),
            judge=lines_judge,
            for_devices=True,
        ),
        Monitor(
            source=INTERFACES,
            period_s=5.0,
            open=_network_links,
            judge=link_state.judge_of(lambda name: name == interface_with(place.address) or is_hardware(name, root)),
            for_devices=True,
        ),
        Monitor(
            source=MEMORY,
            period_s=memory_pressure.POLL_S,
            open=lambda: Polled(function=lambda _: memory_pressure.read_tightest(root)),
            judge=comparing(memory_pressure.memory_symptoms),
        ),
        Monitor(
            source=DISKS,
            period_s=5.0,
            open=lambda: host_load.open_disks(root),
            judge=comparing(host_load.disk_symptoms),
        ),
        Monitor(
            source=CPU_LIMIT,
            period_s=5.0,
            open=lambda: host_load.open_cpu_limit(root),
            judge=comparing(host_load.cpu_symptoms),
        ),
        Monitor(
            source="CPU temperature",
            period_s=10.0,
            open=lambda: host_load.open_thermal_throttles(root),
            judge=comparing(host_load.thermal_symptoms),
        ),
        Monitor(
            source=RDMA_PORTS,
            period_s=rdma_ports.PERIOD_S,
            open=lambda: rdma_ports.open_ports(root),
            judge=rdma_ports.port_judge,
            asks_driver=True,
        ),
        Monitor(
            source=GPUS,
            period_s=5.0,
            open=lambda: nvml.NvmlGpus(place.load_nvml(), place.is_visible),
            judge=gpu_judge,
            asks_driver=True,
            for_devices=True,
        ),
        Monitor(
            source="GPU events (NVML)",
            period_s=1.0,
            open=lambda: nvml.NvmlXids(place.load_nvml(), place.is_visible),
            judge=lines_judge,
            asks_driver=True,
            for_devices=True,
        ),
        Monitor(
            source="DCGM exporter",
            period_s=15.0,
            open=lambda: _exporter(place),
            judge=gpu_judge,
            asks_driver=True,
            for_devices=True,
        ),
    )


def _line_symptoms(_before: tuple[str, ...], now: tuple[str, ...], classify: Classify) -> tuple[Symptom, ...]:
    return tuple(kernel_symptoms(now, classify))


def _kernel_log(path: Path) -> KernelLogTail:
    try:
        return KernelLogTail(path)
    except OSError as error:
        raise SourceMissing(f"{path}: {error.strerror}") from error


def _network_links() -> NetworkLinks:
    try:
        return NetworkLinks()
    except OSError as error:
        raise SourceMissing(f"rtnetlink: {error.strerror}") from error


def _exporter(place: NodePlace) -> Polled[GpuReading]:
    """The exporter says nothing that NVML does not say earlier."""
    try:
        nvml.NvmlGpus(place.load_nvml(), place.is_visible).close()
    except SourceMissing:
        return dcgm_exporter.open_exporter()
    raise SourceMissing("not needed: NVML is available")
