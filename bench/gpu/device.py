"""The device that a section measures on, with its clock: a GPU and CUDA events, or the CPU in CI.

A mark is a point in the device's work: on a GPU an event of the current stream, which is reached when all work before
it is done. So the time between two marks includes every moment in which the device waited for the host.
"""

from __future__ import annotations

import gc
import os
import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.cuda import nccl

from bench.gpu.section import HOST, DeviceInfo


class Device(ABC):
    """The device of this process."""

    torch: torch.device

    @abstractmethod
    def mark(self) -> Any:
        """Mark this point of the device's work."""

    @abstractmethod
    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two marks, on the device's clock; waits for the second."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is idle."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Free memory of the device."""

    def release(self) -> None:
        """Return memory that no tensor uses to the device."""
        gc.collect()


class _Gpu(Device):
    def __init__(self) -> None:
        self.torch = torch.device("cuda", 0)
        torch.cuda.set_device(self.torch)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def release(self) -> None:
        super().release()
        torch.cuda.empty_cache()


class _Cpu(Device):
    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        torch.set_num_threads(1)  # waiting threads of a busy machine would take the CPU time of tiny sizes

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, begin: float, end: float) -> float:
        return 1e3 * (end - begin)

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def open_device(info: DeviceInfo) -> Device:
    """The device, opened in this process."""
    return _Gpu() if info.kind == "cuda" else _Cpu()


def probe() -> DeviceInfo:
    """The first GPU of this machine, else its CPU; opens the GPU, so no fork of this process can use it."""
    if not torch.cuda.is_available():
        return HOST
    properties = torch.cuda.get_device_properties(0)
    version = ".".join(map(str, nccl.version()))
    return DeviceInfo(
        kind="cuda",
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        software=f"CUDA {torch.version.cuda}, NCCL {version}",
    )
