"""What a rank writes when a device fails: the lines of torch and NCCL, for drills on machines without that fault.

Sources: torch 2.15 ProcessGroupNCCL.cpp and c10/cuda/CUDAException.cpp; NCCL 2.27 src/misc/nvmlwrap.cc and
src/transport/net_ib; the texts of CUDA errors are those of cudaGetErrorString.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.events import FaultAction, FaultTarget

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
