"""Owns what CUDA's errors mean to a training run: names of the driver, names of the runtime, numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.diagnose.knowledge.explanation import Explanation

SOURCE = "NVIDIA, CUDA driver API, CUresult: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html"


@dataclass(frozen=True)
class CudaError:
    """One error: `name` is the driver's without `CUDA_ERROR_` (empty: it has none), `runtime` without `cudaError`."""

    number: int
    name: str
    runtime: str
    cause: str
    confirm: str
    remedy: str


_BLOCKING = "CUDA_LAUNCH_BLOCKING=1 makes the traceback point at the kernel; `compute-sanitizer` names the access."
_XID = "`dmesg -T | grep -i xid` on that node, then `holdfast explain XID-…`."

ERRORS: tuple[CudaError, ...] = (
    CudaError(
        1,
        "INVALID_VALUE",
        "InvalidValue",
        "A call was given a value it does not take.",
        "The traceback's innermost call.",
        "Mend the call; after an upgrade: check that the library was built for this CUDA.",
    ),
    CudaError(
        2,
        "OUT_OF_MEMORY",
        "MemoryAllocation",
        "The GPU has no memory left: the model, the batch, fragments, or another process on it.",
        "`nvidia-smi` for other processes; torch's message says how much is reserved but not allocated.",
        "A smaller micro-batch, activation checkpointing, sharding; much reserved memory: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    ),
    CudaError(
        3,
        "NOT_INITIALIZED",
        "InitializationError",
        "CUDA could not be set up: a process forked after CUDA was used, or the driver is not ready.",
        "`nvidia-smi` on that node.",
        "Start worker processes with `spawn`; if nvidia-smi fails too, look after the driver.",
    ),
    CudaError(
        35,
        "",
        "InsufficientDriver",
        "The driver is older than this CUDA needs.",
        "`nvidia-smi` shows the driver and the newest CUDA it knows.",
        "Update the driver, or use an image with an older CUDA.",
    ),
    CudaError(
        46,
        "DEVICE_UNAVAILABLE",
        "DevicesUnavailable",
        "The GPU is held by somebody else, or in exclusive mode.",
        "`nvidia-smi -q -d COMPUTE`, `nvidia-smi` for processes.",
        "End what holds it, or set the compute mode to default.",
    ),
    CudaError(
        100,
        "NO_DEVICE",
        "NoDevice",
        "The process sees no GPU.",
        "`nvidia-smi -L` inside the container; CUDA_VISIBLE_DEVICES.",
        "Ask for GPUs (`gpus_per_node`, the resource nvidia.com/gpu); check the container runtime.",
    ),
    CudaError(
        101,
        "INVALID_DEVICE",
        "InvalidDevice",
        "The process asked for a GPU number that it does not have.",
        "`nvidia-smi -L | wc -l` against the ranks of the node.",
        "torch.cuda.set_device(LOCAL_RANK), and no more ranks than GPUs.",
    ),
    CudaError(
        209,
        "NO_BINARY_FOR_GPU",
        "NoKernelImageForDevice",
        "The library has no code for this kind of GPU.",
        "`torch.cuda.get_arch_list()` against `nvidia-smi --query-gpu=compute_cap --format=csv`.",
        "A build for this GPU, or a newer one.",
    ),
    CudaError(
        214,
        "ECC_UNCORRECTABLE",
        "ECCUncorrectable",
        "The GPU's memory returned data that could not be corrected: hardware.",
        f"`nvidia-smi -q -d ECC`; {_XID}",
        "Drain the node, reset the GPU; again: replace it.",
    ),
    CudaError(
        217,
        "PEER_ACCESS_UNSUPPORTED",
        "PeerAccessUnsupported",
        "Two GPUs of the node cannot reach each other directly.",
        "`nvidia-smi topo -p2p r`.",
        "NCCL_P2P_DISABLE=1 where the topology has none; else ACS and IOMMU.",
    ),
    CudaError(
        220,
        "NVLINK_UNCORRECTABLE",
        "NvlinkUncorrectable",
        "A link between GPUs failed: hardware.",
        f"`nvidia-smi nvlink -e`; {_XID}",
        "Reset the GPUs or reboot; on the same link again: replace.",
    ),
    CudaError(
        226,
        "CONTAINED",
        "Contained",
        "An error of the GPU's memory that only this program felt.",
        _XID,
        "Restart the job; reset the GPU at the next pause.",
    ),
    CudaError(
        401,
        "ILLEGAL_STATE",
        "IllegalState",
        "Something needed was not in the right state; from NVLink SHARP (NVLS) it means that the Fabric Manager or "
        "IMEX is not running.",
        "`systemctl status nvidia-fabricmanager nvidia-imex`; `nvidia-smi -q | grep -A2 Fabric`.",
        "Start them; NCCL_NVLS_ENABLE=0 goes without, slower.",
    ),
    CudaError(
        700,
        "ILLEGAL_ADDRESS",
        "IllegalAddress",
        "A kernel used an address that is not its own: an index out of bounds, freed memory. Reported at a later call.",
        f"{_BLOCKING} Xid 31 or 13 stands in dmesg.",
        "Mend the kernel or the index: token ids against the embedding's size are the usual one.",
    ),
    CudaError(
        702,
        "LAUNCH_TIMEOUT",
        "LaunchTimeout",
        "A kernel ran longer than the display's watchdog allows.",
        "`nvidia-smi -q | grep -i display`.",
        "Use a GPU without a display.",
    ),
    CudaError(
        710,
        "ASSERT",
        "Assert",
        "An assertion inside a kernel failed; mostly an index out of bounds.",
        "The line `Assertion … failed` above it; CUDA_LAUNCH_BLOCKING=1 shows the call.",
        "Mend the index: labels and token ids must be smaller than the table.",
    ),
    CudaError(
        715,
        "ILLEGAL_INSTRUCTION",
        "IllegalInstruction",
        "A kernel has an instruction that this GPU lacks.",
        _BLOCKING,
        "A build for this GPU.",
    ),
    CudaError(
        716,
        "MISALIGNED_ADDRESS",
        "MisalignedAddress",
        "A kernel used an address that is not aligned.",
        _BLOCKING,
        "Mend the kernel; views that start in the middle of a tensor are the usual reason.",
    ),
    CudaError(
        719,
        "LAUNCH_FAILED",
        "LaunchFailure",
        "A kernel failed on the GPU: a bad access, or hardware.",
        f"{_BLOCKING} {_XID}",
        "With a hardware Xid replace the GPU; else mend the kernel.",
    ),
    CudaError(
        802,
        "SYSTEM_NOT_READY",
        "SystemNotReady",
        "The node's NVSwitches are not set up: the Fabric Manager does not run, or is not of the driver's version.",
        "`systemctl status nvidia-fabricmanager`; `nvidia-smi -q | grep -A2 Fabric`.",
        "Start nvidia-fabricmanager, in the driver's version.",
    ),
    CudaError(
        803,
        "SYSTEM_DRIVER_MISMATCH",
        "SystemDriverMismatch",
        "The driver's library and its kernel module are of different versions: updated, and not rebooted.",
        "`cat /proc/driver/nvidia/version` against `nvidia-smi`.",
        "Reload the module or reboot; in a container use the host's library.",
    ),
    CudaError(
        999,
        "UNKNOWN",
        "Unknown",
        "The driver does not know either; often a GPU that was lost.",
        _XID,
        "Act on the Xid; without one, restart the node.",
    ),
)


def rows() -> Iterator[Explanation]:
    """Each by the driver's name where it has one; the runtime's name and the number find it too."""
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
