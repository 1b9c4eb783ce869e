"""What a rank writes when a device fails, and what monitors then read, for drills on machines without that fault.

Sources: torch 2.15 ProcessGroupNCCL.cpp and c10/cuda/CUDAException.cpp; NCCL 2.27 src/misc/nvmlwrap.cc and
src/transport/net_ib; the texts of CUDA errors are those of cudaGetErrorString.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from holdfast.events import FaultAction, FaultTarget
from holdfast.host.rdma_counters import CounterReading
from holdfast.watch.gpu_readings import GpuReading, GpuState
from holdfast.watch.monitor_loop import Overlay
from holdfast.watch.monitor_table import GPUS, RDMA_PORTS

_EXPLAINED = """\
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
_WATCHDOG = "[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with exception: "


def _by_watchdog(error: str) -> str:
    """The end of a rank whose NCCL watchdog meets an error."""
    return (
        f"[rank{{rank}}]:[E1123 10:00:00.123456789 ProcessGroupNCCL.cpp:2105] {_WATCHDOG}{error}"
        f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {_WATCHDOG}{error}"
    )


def _cuda_error(text: str) -> str:
    return f"CUDA error: {text}\n{_EXPLAINED}\n"


_WARN = "node:4242:4300 [{rank}] "
_LOST_GPU = f"{_WARN}misc/nvmlwrap.cc:190 NCCL WARN nvmlDeviceGetHandleByIndex({{rank}}) failed: GPU is lost\n"
_LINK_DOWN = f"{_WARN}transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error\n"
_SYSTEM_ERROR = (
    "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
)

DEVICE_OUTPUTS: Mapping[tuple[FaultAction, FaultTarget], str] = {
    (FaultAction.FAIL, FaultTarget.GPU): _LOST_GPU + _by_watchdog(_cuda_error("unknown error")),
    (FaultAction.ECC_ERROR, FaultTarget.GPU): _by_watchdog(_cuda_error("uncorrectable ECC error encountered")),
    (FaultAction.FAIL, FaultTarget.NVLINK): _by_watchdog(
        _cuda_error("uncorrectable NVLink error detected during the execution")
    ),
    (FaultAction.FAIL, FaultTarget.NIC): _LINK_DOWN + _by_watchdog(_SYSTEM_ERROR),
}
"""The output by fault; `{rank}` stands for the rank."""

THERMAL_SLOWDOWN = 0x40
SYMBOL_ERRORS_S = 100.0


def _throttled(rank: int) -> Overlay:
    """One more GPU, which the hardware slows down because it is too hot."""
    hot = GpuState(utilisation=100, temperature_c=92, slowdowns=THERMAL_SLOWDOWN)

    def overlay(reading: GpuReading | None, at_s: float) -> GpuReading:
        return GpuReading(at_s=at_s, gpus={**(reading.gpus if reading else {}), f"GPU of rank {rank}": hot})

    return overlay


def _with_link_errors(rank: int) -> Overlay:
    """One more port, whose symbol errors grow."""

    def overlay(reading: CounterReading | None, at_s: float) -> CounterReading:
        known = reading or CounterReading(at_s=at_s, ports={})
        return replace(
            known, ports={**known.ports, f"NIC of rank {rank}": {"symbol_error": int(SYMBOL_ERRORS_S * at_s)}}
        )

    return overlay


OVERLAYS: Mapping[tuple[FaultAction, FaultTarget], tuple[str, Callable[[int], Overlay]]] = {
    (FaultAction.THROTTLE, FaultTarget.GPU): (GPUS, _throttled),
    (FaultAction.LINK_ERRORS, FaultTarget.NIC): (RDMA_PORTS, _with_link_errors),
}
"""By fault: the source whose readings it changes, and how, for a rank."""
