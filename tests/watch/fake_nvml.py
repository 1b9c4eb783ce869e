"""NVML of a node whose GPUs a test changes: the functions of `pynvml` that the adapter calls, with its own errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml

THERMAL = 0x40
NVLINK_FIELDS = {"crc_flit": 38, "crc_data": 45, "replay": 52, "recovery": 59}
FIELDS = {"retirement_pending": 31, "remap_pending": 144, "remap_failed": 145, "pcie_replays": 94, **NVLINK_FIELDS}


@dataclass
class FakeGpu:
    """One GPU; a value of None is not supported by its driver."""

    bus_id: str
    uuid: str
    lost: int | None = None
    """The driver's error for every call."""
    slowdowns: int | None = 0
    uncorrectable: int | None = 0
    fields: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIELDS, 0))


class FakeNvml:
    """The module; a handle is a GPU's number from 1."""

    NVMLError = pynvml.NVMLError

    def __init__(self, gpus: int = 2, *, events: bool = True) -> None:
        self.gpus = [FakeGpu(f"00000000:{0x1B + n:02X}:00.0", f"GPU-{n}") for n in range(gpus)]
        self.events: list[tuple[int, int]] = []
        self.has_events = events
        self.users = 0
        self.watched: set[int] = set()

    def _gpu(self, handle: int) -> FakeGpu:
        gpu = self.gpus[handle - 1]
        if gpu.lost is not None:
            raise pynvml.NVMLError(gpu.lost)
        return gpu

    @staticmethod
    def _supported(value: int | None) -> int:
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlInit(self) -> None:
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._gpu(index + 1)
        return index + 1

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self._gpu(handle).uuid

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self._gpu(handle).bus_id)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self._supported(self._gpu(handle).slowdowns)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self._gpu(handle)
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._gpu(handle)
        return 612_345

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._gpu(handle)
        return 71 + sensor

    def nvmlDeviceGetTotalEccErrors(self, handle: int, error_type: int, counter_type: int) -> int:
        assert (error_type, counter_type) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return self._supported(self._gpu(handle).uncorrectable)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[object]:
        known = {FIELDS[name]: value for name, value in self._gpu(handle).fields.items()}
        answers: list[object] = []
        for number in fields:
            value = pynvml.c_nvmlFieldValue_t()
            value.fieldId, value.valueType = number, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            value.nvmlReturn = pynvml.NVML_SUCCESS if number in known else pynvml.NVML_ERROR_NOT_SUPPORTED
            value.value = pynvml.c_nvmlValue_t(ullVal=known.get(number, 0))
            answers.append(value)
        return answers

    def nvmlEventSetCreate(self) -> set[int]:
        return self.watched

    def nvmlDeviceRegisterEvents(self, handle: int, types: int, events: set[int]) -> None:
        if not self.has_events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        assert types == pynvml.nvmlEventTypeXidCriticalError
        events.add(handle)

    def nvmlEventSetWait_v2(self, events: set[int], timeout_ms: int) -> SimpleNamespace:
        assert timeout_ms == 0
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        handle, xid = self.events.pop(0)
        assert handle in events
        return SimpleNamespace(device=handle, eventData=xid)

    def nvmlEventSetFree(self, events: set[int]) -> None:
        events.clear()
