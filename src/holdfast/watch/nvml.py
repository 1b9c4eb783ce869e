"""Reads GPUs through NVML, by the bindings of `nvidia-ml-py`."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from holdfast.events import DeviceFault
from holdfast.watch.gpu_readings import GpuReading, GpuState
from holdfast.watch.kernel_faults import gpu_name
from holdfast.watch.monitor import SourceMissing

T = TypeVar("T")

LIBRARY = "libnvidia-ml.so.1"

# The driver's numbers, from nvml.h.
_GPU_IS_LOST, _RESET_REQUIRED = 15, 16
_FAILURES: Mapping[int, DeviceFault] = {_GPU_IS_LOST: DeviceFault.GPU, _RESET_REQUIRED: DeviceFault.RESET}
_XID_EVENT = 0x8
_TEMPERATURE_OF_GPU = 0
_UNCORRECTED, _VOLATILE = 1, 0
_RETIREMENT_PENDING, _REMAP_PENDING, _REMAP_FAILED, _PCIE_REPLAYS = 31, 144, 145, 94
_FLIT_CRC, _DATA_CRC, _REPLAYS, _RECOVERIES = 38, 45, 52, 59
_FIELDS = (
    _RETIREMENT_PENDING,
    _REMAP_PENDING,
    _REMAP_FAILED,
    _PCIE_REPLAYS,
    _FLIT_CRC,
    _DATA_CRC,
    _REPLAYS,
    _RECOVERIES,
)
_UNSIGNED_INT, _UNSIGNED_LONG, _UNSIGNED_LONG_LONG = 1, 2, 3
_MEMBERS: Mapping[int, str] = {_UNSIGNED_INT: "uiVal", _UNSIGNED_LONG: "ulVal", _UNSIGNED_LONG_LONG: "ullVal"}
_SUCCESS = 0

MAX_EVENTS = 100
"""Most events of one reading."""


def load() -> Any:
    """The bindings; they are imported only where the driver's library is, because they take 50 ms and 4 MiB."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise SourceMissing(f"{LIBRARY}: not found") from error
    import pynvml

    return pynvml


class NvmlGpus:
    """The GPUs that NVML shows this process."""

    def __init__(self, bindings: Any, is_visible: Callable[[int, str], bool] = lambda _index, _uuid: True) -> None:
        """Initialise NVML; raises SourceMissing if it has no GPU for the run, by index and UUID."""
        self._nvml = bindings
        try:
            bindings.nvmlInit()
        except bindings.NVMLError as error:
            raise SourceMissing(f"NVML: {error}") from error
        self.handles: Mapping[str, Any] = dict(self._find(is_visible))
        """By name."""
        if not self.handles:
            bindings.nvmlShutdown()
            raise SourceMissing("NVML shows no GPU")

    def _find(self, is_visible: Callable[[int, str], bool]) -> Iterator[tuple[str, Any]]:
        for index in range(self._nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(self._nvml.NVMLError):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                if is_visible(index, _text(self._nvml.nvmlDeviceGetUUID(handle))):
                    yield gpu_name(_text(self._nvml.nvmlDeviceGetPciInfo(handle).busId)), handle

    def read(self, at_s: float) -> GpuReading:
        """The state of all GPUs now."""
        return GpuReading(at_s=at_s, gpus={name: self._state(handle) for name, handle in self.handles.items()})

    def descriptor(self) -> None:
        """NVML has to be polled."""

    def close(self) -> None:
        """Give NVML back."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _state(self, handle: Any) -> GpuState:
        nvml = self._nvml
        try:
            slowdowns = self._value(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
            use = self._value(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
            power_mw = self._value(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
            fields = self._fields(handle)
            retries = [fields[field] for field in (_FLIT_CRC, _DATA_CRC, _REPLAYS) if field in fields]
            return GpuState(
                utilisation=None if use is None else int(use.gpu),
                power_w=None if power_mw is None else power_mw / 1000,
                temperature_c=self._value(lambda: nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_OF_GPU)),
                slowdowns=slowdowns or 0,
                uncorrectable=self._value(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE)),
                repair_pending=bool(fields.get(_RETIREMENT_PENDING) or fields.get(_REMAP_PENDING)),
                repair_failed=bool(fields.get(_REMAP_FAILED)),
                nvlink_recoveries=fields.get(_RECOVERIES),
                nvlink_retries=sum(retries) if retries else None,
                pcie_replays=fields.get(_PCIE_REPLAYS),
            )
        except nvml.NVMLError as error:  # only those of a failed GPU come here
            return GpuState(failure=_FAILURES[error.value], error=str(error))

    def _value(self, read: Callable[[], T]) -> T | None:
        """What the driver answers; None if it has no such value. Raises the errors of a failed GPU."""
        try:
            return read()
        except self._nvml.NVMLError as error:
            if error.value in _FAILURES:
                raise
            return None

    def _fields(self, handle: Any) -> dict[int, int]:
        values = self._value(lambda: self._nvml.nvmlDeviceGetFieldValues(handle, list(_FIELDS)))
        return {
            each.fieldId: int(getattr(each.value, _MEMBERS[each.valueType]))
            for each in values or ()
            if each.nvmlReturn == _SUCCESS and each.valueType in _MEMBERS
        }


class NvmlXids:
    """The Xids of GPUs, as NVML's events report them; they also reach containers without the kernel's log."""

    def __init__(self, bindings: Any, is_visible: Callable[[int, str], bool] = lambda _index, _uuid: True) -> None:
        self._gpus = NvmlGpus(bindings, is_visible)
        self._nvml = bindings
        self._names = {_pointer(handle): name for name, handle in self._gpus.handles.items()}
        try:
            self._events = bindings.nvmlEventSetCreate()
            for handle in self._gpus.handles.values():
                bindings.nvmlDeviceRegisterEvents(handle, _XID_EVENT, self._events)
        except bindings.NVMLError as error:
            self._gpus.close()
            raise SourceMissing(f"NVML has no events here: {error}") from error

    def read(self, at_s: float) -> tuple[str, ...]:
        """Lines, as the driver logs them, of the events since the last reading."""
        found: list[str] = []
        with contextlib.suppress(self._nvml.NVMLError):  # ends when none is left
            while len(found) < MAX_EVENTS:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                address = self._names.get(_pointer(event.device), "").removeprefix("GPU ")
                found.append(f"NVRM: Xid (PCI:{address}): {int(event.eventData)}, by an event of NVML")
        return tuple(found)

    def descriptor(self) -> None:
        """NVML has to be polled."""

    def close(self) -> None:
        """Give NVML back."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlEventSetFree(self._events)
        self._gpus.close()


def _pointer(handle: Any) -> int | None:
    """What identifies a GPU also after it is lost, when NVML can name it no more."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
