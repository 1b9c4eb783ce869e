"""Reads GPUs from the metrics of a DCGM exporter on this node, where NVML is not available to this process."""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping

from holdfast.watch.gpu_readings import GpuReading, GpuState
from holdfast.watch.kernel_faults import gpu_name
from holdfast.watch.monitor import Polled, SourceMissing

HOST, PORT = "localhost", 9400
TIMEOUT_S = 2.0
MAX_BYTES = 4 << 20

_BLANK = 0x7FFFFFF0
"""DCGM's values from here on mean that there is none (DCGM_INT32_BLANK, and larger ones)."""

# DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52",pci_bus_id="00000000:1B:00.0"} 41
_SAMPLE = re.compile(r"^DCGM_FI_DEV_(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>[\d.eE+-]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def open_exporter(host: str = HOST, port: int = PORT) -> Polled[GpuReading]:
    """The exporter, if it answers with metrics of GPUs; raises SourceMissing."""

    def read(at_s: float) -> GpuReading:
        return GpuReading(at_s=at_s, gpus=parse_metrics(_get(host, port)))

    try:
        first = read(0.0)
    except (OSError, http.client.HTTPException) as error:
        raise SourceMissing(f"nothing answers at {host}:{port}") from error
    if not first.gpus:
        raise SourceMissing(f"what answers at {host}:{port} has no metrics of GPUs")
    return Polled(function=read)


def parse_metrics(text: str) -> Mapping[str, GpuState]:
    """The GPUs in the exporter's text."""
    found: dict[str, dict[str, float]] = {}
    for sample in _SAMPLE.finditer(text):
        labels = dict(_LABEL.findall(sample["labels"]))
        name = gpu_name(labels["pci_bus_id"]) if labels.get("pci_bus_id") else f"GPU {labels.get('gpu', '')}"
        if (value := float(sample["value"])) < _BLANK:
            found.setdefault(name, {})[sample["name"]] = value
    return {name: _state(values) for name, values in found.items()}


def _state(values: Mapping[str, float]) -> GpuState:
    def whole(*names: str) -> int | None:
        known = [int(values[name]) for name in names if name in values]
        return sum(known) if known else None

    return GpuState(
        utilisation=whole("GPU_UTIL"),
        power_w=values.get("POWER_USAGE"),
        temperature_c=whole("GPU_TEMP"),
        slowdowns=whole("CLOCK_THROTTLE_REASONS") or whole("CLOCKS_EVENT_REASONS") or 0,
        uncorrectable=whole("ECC_DBE_VOL_TOTAL"),
        repair_pending=bool(whole("ROW_REMAP_PENDING", "RETIRED_PENDING")),
        repair_failed=bool(whole("ROW_REMAP_FAILURE")),
        nvlink_recoveries=whole("NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
        nvlink_retries=whole(
            "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "NVLINK_REPLAY_ERROR_COUNT_TOTAL"
        ),
        pcie_replays=whole("PCIE_REPLAY_COUNTER"),
        xid=whole("XID_ERRORS") or 0,
    )


def _get(host: str, port: int) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read(MAX_BYTES).decode(errors="replace")
    finally:
        connection.close()
