"""What a node's monitors last read, as a few numbers for a scrape: sums and extremes over its devices. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from holdfast.host.memory_usage import MemoryUsage
from holdfast.host.network_links import LinkReading
from holdfast.host.rdma_counters import CounterReading
from holdfast.watch.gpu_readings import GpuReading, GpuState
from holdfast.watch.host_load import CpuUse, DiskUse
from holdfast.watch.monitor_table import CPU_LIMIT, DISKS, GPUS, INTERFACES, MEMORY, RDMA_PORTS
from holdfast.watch.rdma_traffic import ERRORS


class NodeValue(NamedTuple):
    """How one number follows from the reading of a source; None where the reading lacks it."""

    source: str
    read: Callable[[Any], float | None]


def _gpus(value: Callable[[GpuState], float | None], over: Callable[[list[float]], float]) -> NodeValue:
    def read(reading: GpuReading) -> float | None:
        known = [found for gpu in reading.gpus.values() if (found := value(gpu)) is not None]
        return over(known) if known else None

    return NodeValue(GPUS, read)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _used(reading: MemoryUsage) -> float:
    return reading.used_fraction


def _memory_stalled(reading: MemoryUsage) -> float:
    return reading.stalled / 100


def _cpu_stalled(reading: CpuUse) -> float:
    return reading.stalled_percent / 100


def _throttled(reading: CpuUse) -> float:
    return reading.throttled


def _disk_requests(reading: Mapping[str, DiskUse]) -> float:
    return sum(disk.requests for disk in reading.values())


def _disk_wait_s(reading: Mapping[str, DiskUse]) -> float:
    return sum(disk.waited_ms for disk in reading.values()) / 1000


def _links_down(reading: LinkReading) -> float:
    return sum(not has_link for has_link in reading.links.values())


def _ports_down(reading: CounterReading) -> float:
    return len(reading.down)


def _port_errors(reading: CounterReading) -> float:
    return sum(port.get(error, 0) for port in reading.ports.values() for error in ERRORS)


NODE_VALUES: Mapping[str, NodeValue] = {
    "memory_used_ratio": NodeValue(MEMORY, _used),
    "memory_stalled_ratio": NodeValue(MEMORY, _memory_stalled),
    "cpu_stalled_ratio": NodeValue(CPU_LIMIT, _cpu_stalled),
    "cpu_throttled_periods": NodeValue(CPU_LIMIT, _throttled),
    "disk_requests": NodeValue(DISKS, _disk_requests),
    "disk_wait_seconds": NodeValue(DISKS, _disk_wait_s),
    "links_down": NodeValue(INTERFACES, _links_down),
    "rdma_ports_down": NodeValue(RDMA_PORTS, _ports_down),
    "rdma_port_errors": NodeValue(RDMA_PORTS, _port_errors),
    "gpus_failed": _gpus(lambda gpu: float(gpu.failure is not None), sum),
    "gpu_temperature_celsius": _gpus(lambda gpu: gpu.temperature_c, max),
    "gpu_power_watts": _gpus(lambda gpu: gpu.power_w, sum),
    "gpu_utilization_ratio": _gpus(lambda gpu: None if gpu.utilisation is None else gpu.utilisation / 100, _mean),
    "gpu_memory_errors": _gpus(lambda gpu: gpu.uncorrectable, sum),
}
"""By the name of the metric that it is exported as, without `holdfast_node_`."""


def node_values(latest: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """The numbers that follow from the latest readings, each with its source."""
    readings = dict(latest)
    return {
        name: float(value)
        for name, row in NODE_VALUES.items()
        if row.source in readings and (value := row.read(readings[row.source])) is not None
    }
