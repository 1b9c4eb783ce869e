"""Explains CUDA errors by driver name, runtime name and number."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from holdfast.diagnose.knowledge.explanation import Explanation
from holdfast.events import DeviceFault

SOURCE = "NVIDIA, CUDA driver API, CUresult: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html"


class CudaError(Struct, frozen=True):
    """One error: `name` is the driver's name without `CUDA_ERROR_` (empty if it has none), `runtime` without
    `cudaError`.
    """

    number: int
    name: str
    runtime: str
    text: str
    """What cudaGetErrorString returns for it, which torch and NCCL print."""
    cause: str
    confirm: str
    remedy: str
    fault: DeviceFault | None = None
    """What it says of the GPU when a rank has failed; None for a fault of the program or of its installation."""


_BLOCKING = "CUDA_LAUNCH_BLOCKING=1 makes the traceback point at the kernel; `compute-sanitizer` names the access."
_XID = "`dmesg -T | grep -i xid` on that node, then `holdfast explain XID-…`."

ERRORS: tuple[CudaError, ...] = (
    CudaError(
        1,
        "INVALID_VALUE",
        "InvalidValue",
        "invalid argument",
        "A call received an invalid value.",
        "The traceback's innermost call.",
        "Fix the call; after an upgrade, check that the library was built for this CUDA.",
    ),
    CudaError(
        2,
        "OUT_OF_MEMORY",
        "MemoryAllocation",
        "out of memory",
        "The GPU is out of memory: the model, the batch, fragmentation, or another process on it.",
        "`nvidia-smi` for other processes; torch's message says how much is reserved but not allocated.",
        "A smaller micro-batch, activation checkpointing, sharding; if much is reserved: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    ),
    CudaError(
        3,
        "NOT_INITIALIZED",
        "InitializationError",
        "initialization error",
        "CUDA initialisation failed: a process forked after CUDA was used, or the driver is not ready.",
        "`nvidia-smi` on that node.",
        "Start worker processes with `spawn`; if nvidia-smi fails too, fix the driver.",
    ),
    CudaError(
        35,
        "",
        "InsufficientDriver",
        "CUDA driver version is insufficient for CUDA runtime version",
        "The driver is older than this CUDA needs.",
        "`nvidia-smi` shows the driver and the newest CUDA it supports.",
        "Update the driver, or use an image with an older CUDA.",
    ),
    CudaError(
        46,
        "DEVICE_UNAVAILABLE",
        "DevicesUnavailable",
        "CUDA-capable device(s) is/are busy or unavailable",
        "Another process holds the GPU, or the GPU is in exclusive mode.",
        "`nvidia-smi -q -d COMPUTE`, `nvidia-smi` for processes.",
        "End that process, or set the compute mode to default.",
        DeviceFault.UNCLEAR,
    ),
    CudaError(
        100,
        "NO_DEVICE",
        "NoDevice",
        "no CUDA-capable device is detected",
        "The process sees no GPU.",
        "`nvidia-smi -L` inside the container; CUDA_VISIBLE_DEVICES.",
        "Request GPUs (`gpus_per_node`, the resource nvidia.com/gpu); check the container runtime.",
    ),
    CudaError(
        101,
        "INVALID_DEVICE",
        "InvalidDevice",
        "invalid device ordinal",
        "The process selected a GPU index that it does not have.",
        "Compare `nvidia-smi -L | wc -l` with the ranks of the node.",
        "torch.cuda.set_device(LOCAL_RANK), and no more ranks than GPUs.",
    ),
    CudaError(
        209,
        "NO_BINARY_FOR_GPU",
        "NoKernelImageForDevice",
        "no kernel image is available for execution on the device",
        "The library has no code for this kind of GPU.",
        "`torch.cuda.get_arch_list()` against `nvidia-smi --query-gpu=compute_cap --format=csv`.",
        "Install a build for this GPU, or a newer one.",
    ),
    CudaError(
        214,
        "ECC_UNCORRECTABLE",
        "ECCUncorrectable",
        "uncorrectable ECC error encountered",
        "The GPU's memory returned data with an uncorrectable error: a hardware fault.",
        f"`nvidia-smi -q -d ECC`; {_XID}",
        "Drain the node and reset the GPU; if it comes again, replace it.",
        DeviceFault.MEMORY,
    ),
    CudaError(
        217,
        "PEER_ACCESS_UNSUPPORTED",
        "PeerAccessUnsupported",
        "peer access is not supported between these two devices",
        "Two GPUs of the node cannot reach each other directly.",
        "`nvidia-smi topo -p2p r`.",
        "NCCL_P2P_DISABLE=1 if the topology has no peer path; else turn off ACS and the IOMMU.",
    ),
    CudaError(
        220,
        "NVLINK_UNCORRECTABLE",
        "NvlinkUncorrectable",
        "uncorrectable NVLink error detected during the execution",
        "A link between GPUs failed: a hardware fault.",
        f"`nvidia-smi nvlink -e`; {_XID}",
        "Reset the GPUs or reboot; if the same link fails again, replace it.",
        DeviceFault.NVLINK,
    ),
    CudaError(
        226,
        "CONTAINED",
        "Contained",
        "Invalid access of peer GPU memory over nvlink or a hardware error",
        "An uncorrectable GPU memory error that affected only this program.",
        _XID,
        "Restart the job; reset the GPU at the next pause.",
        DeviceFault.CONTAINED,
    ),
    CudaError(
        401,
        "ILLEGAL_STATE",
        "IllegalState",
        "the operation cannot be performed in the present state",
        "The system is not in the required state; from NVLink SHARP (NVLS) it means that the Fabric Manager or "
        "IMEX is not running.",
        "`systemctl status nvidia-fabricmanager nvidia-imex`; `nvidia-smi -q | grep -A2 Fabric`.",
        "Start them; NCCL_NVLS_ENABLE=0 works without NVLS, but slower.",
    ),
    CudaError(
        700,
        "ILLEGAL_ADDRESS",
        "IllegalAddress",
        "an illegal memory access was encountered",
        "A kernel accessed an invalid address: an index out of bounds, freed memory. CUDA reports it at a later call.",
        f"{_BLOCKING} dmesg shows Xid 31 or 13.",
        "Fix the kernel or the index: the usual reason is a token id beyond the embedding's size.",
    ),
    CudaError(
        702,
        "LAUNCH_TIMEOUT",
        "LaunchTimeout",
        "the launch timed out and was terminated",
        "A kernel ran longer than the display's watchdog allows.",
        "`nvidia-smi -q | grep -i display`.",
        "Use a GPU without a display.",
    ),
    CudaError(
        710,
        "ASSERT",
        "Assert",
        "device-side assert triggered",
        "An assertion inside a kernel failed; mostly an index out of bounds.",
        "The line `Assertion … failed` above it; CUDA_LAUNCH_BLOCKING=1 shows the call.",
        "Fix the index: labels and token ids must be smaller than the table.",
    ),
    CudaError(
        714,
        "HARDWARE_STACK_ERROR",
        "HardwareStackError",
        "hardware stack error",
        "A kernel's call stack was corrupted, or exceeded its limit.",
        f"{_BLOCKING} {_XID}",
        "With a hardware Xid replace the GPU; else fix the kernel, or raise its stack limit.",
        DeviceFault.UNCLEAR,
    ),
    CudaError(
        715,
        "ILLEGAL_INSTRUCTION",
        "IllegalInstruction",
        "an illegal instruction was encountered",
        "A kernel has an instruction that this GPU lacks.",
        _BLOCKING,
        "Install a build for this GPU.",
    ),
    CudaError(
        716,
        "MISALIGNED_ADDRESS",
        "MisalignedAddress",
        "misaligned address",
        "A kernel used an address that is not aligned.",
        _BLOCKING,
        "Fix the kernel; the usual reason is a view that starts in the middle of a tensor.",
    ),
    CudaError(
        719,
        "LAUNCH_FAILED",
        "LaunchFailure",
        "unspecified launch failure",
        "A kernel failed on the GPU: a bad access, or hardware.",
        f"{_BLOCKING} {_XID}",
        "With a hardware Xid replace the GPU; else fix the kernel.",
        DeviceFault.UNCLEAR,
    ),
    CudaError(
        802,
        "SYSTEM_NOT_READY",
        "SystemNotReady",
        "system not yet initialized",
        "The node's NVSwitches are not set up: the Fabric Manager is not running, or its version differs from "
        "the driver's.",
        "`systemctl status nvidia-fabricmanager`; `nvidia-smi -q | grep -A2 Fabric`.",
        "Start nvidia-fabricmanager, in the driver's version.",
        DeviceFault.NOT_READY,
    ),
    CudaError(
        803,
        "SYSTEM_DRIVER_MISMATCH",
        "SystemDriverMismatch",
        "system has unsupported display driver / cuda driver combination",
        "The driver's library and its kernel module have different versions: updated without a reboot.",
        "Compare `cat /proc/driver/nvidia/version` with `nvidia-smi`.",
        "Reload the module or reboot; in a container use the host's library.",
    ),
    CudaError(
        999,
        "UNKNOWN",
        "Unknown",
        "unknown error",
        "The driver does not know the cause either; often a GPU that was lost.",
        _XID,
        "Act on the Xid; without one, restart the node.",
        DeviceFault.UNCLEAR,
    ),
)


def rows() -> Iterator[Explanation]:
    """Each error by the driver's name, else the runtime's; the runtime's name and the number are aliases."""
    for one in ERRORS:
        numbers = (f"CUDA-{one.number}", f"CUDA error {one.number}", *((str(one.number),) if one.number > 255 else ()))
        yield Explanation(
            code=f"CUDA_ERROR_{one.name}" if one.name else f"cudaError{one.runtime}",
            title=f"CUDA error {one.number}, cudaError{one.runtime}" if one.name else f"CUDA error {one.number}",
            cause=one.cause,
            confirm=one.confirm,
            remedy=one.remedy,
            source=SOURCE,
            names=(f"cudaError{one.runtime}", *numbers),
        )
