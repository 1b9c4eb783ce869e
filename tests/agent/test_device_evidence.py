"""The line that reports a fault of a device, in output as torch, NCCL and the driver write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent.device_evidence import TAIL_BYTES, DeviceEvidence, device_evidence
from holdfast.events import DeviceFault

ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
TORCH = f"""[rank3]: Traceback (most recent call last):
[rank3]:   File "/x/train.py", line 40, in <module>
[rank3]:     loss.backward()
[rank3]: {ECC}
[rank3]: CUDA kernel errors might be asynchronously reported at some other API call.
[rank3]: For debugging consider passing CUDA_LAUNCH_BLOCKING=1
[rank3]: Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
NCCL_ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5"
)
NCCL = f"""{NCCL_ERROR}
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 220 'uncorrectable NVLink error detected during the execution'
"""
LAUNCH = "torch.AcceleratorError: CUDA error: unspecified launch failure"
XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
FLAP = "n1:8:9 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error"


def evidence(
    folder: Path, error: str, output: str, kernel: str = "", *, by_signal: bool = False
) -> DeviceEvidence | None:
    log, kernel_log = folder / "rank-3.log", folder / "kmsg"
    log.write_text(output)
    kernel_log.write_text(kernel)
    return device_evidence(error, log, since_us=1_000_000, by_signal=by_signal, kernel_log=kernel_log)


@pytest.mark.parametrize(
    ("error", "output", "kernel", "line", "fault"),
    [
        (ECC, TORCH, "", ECC, DeviceFault.MEMORY),
        (NCCL_ERROR, NCCL, "", NCCL.splitlines()[-1], DeviceFault.NVLINK),
        (LAUNCH, f"{LAUNCH}\n", "", LAUNCH, DeviceFault.UNCLEAR),
        (LAUNCH, f"{LAUNCH}\n", f"4,1,2000000,-;{XID}\n", XID, DeviceFault.GPU),
        (LAUNCH, f"{LAUNCH}\n", f"4,1,999999,-;{XID}\n", LAUNCH, DeviceFault.UNCLEAR),
        ("", "", f"4,1,2000000,-;{XID}\n", XID, DeviceFault.GPU),
        (
            "RuntimeError: training failed",
            f"{TORCH}RuntimeError: training failed\n",
            "",
            f"[rank3]: {ECC}",
            DeviceFault.MEMORY,
        ),
        (NCCL_ERROR.replace("cuda", "system"), f"{FLAP}\n", "", FLAP, DeviceFault.NIC_LINK_DOWN),
    ],
    ids=["torch", "detail of NCCL", "unclear", "kernel", "earlier Xid", "silent", "chained", "link"],
)
def test_line_with_the_strongest_fault_is_the_evidence(
    tmp_path: Path, error: str, output: str, kernel: str, line: str, fault: DeviceFault
) -> None:
    assert evidence(tmp_path, error, output, kernel) == DeviceEvidence(line=line, fault=fault)


@pytest.mark.parametrize(
    ("error", "output", "kernel"),
    [
        ("ValueError: bad shape", "ValueError: bad shape\n", f"4,1,2000000,-;{XID}\n"),
        ("ValueError: bad shape", f"{FLAP}\nValueError: bad shape\n", ""),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "", ""),
        (
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            "",
            "4,1,2000000,-;NVRM: Xid (PCI:0000:07:00): 31, pid=7, MMU Fault",
        ),
        ("", "step 3 on GPU 1\n", ""),
    ],
    ids=["another's Xid", "an old flap", "out of memory", "illegal access", "nothing"],
)
def test_failure_of_the_program_has_no_such_line(tmp_path: Path, error: str, output: str, kernel: str) -> None:
    assert evidence(tmp_path, error, output, kernel) is None


def test_fatal_signal_is_explained_by_the_kernels_log(tmp_path: Path) -> None:
    error = "Fatal Python error: Bus error"
    assert evidence(tmp_path, error, error, f"4,1,2000000,-;{XID}\n") is None
    assert evidence(tmp_path, error, error, f"4,1,2000000,-;{XID}\n", by_signal=True) is not None


def test_output_long_before_the_end_is_not_searched(tmp_path: Path) -> None:
    assert evidence(tmp_path, "", TORCH + "x" * (TAIL_BYTES // 2)) is not None
    assert evidence(tmp_path, "", TORCH + "x" * TAIL_BYTES) is None


def test_output_that_is_gone_is_no_evidence(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert device_evidence("", missing, since_us=0, by_signal=True, kernel_log=missing) is None
