"""Real lines, by the fault of a device that they report: the table that decides whether a node is replaced."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.diagnose.device_fault_lines import FAULT_OF_RULE, device_fault, strongest_fault
from holdfast.diagnose.knowledge.cuda import ERRORS
from holdfast.diagnose.rules import RULES
from holdfast.events import DeviceFault

TORCH = "[rank3]: torch.AcceleratorError: CUDA error: "
DIST = "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
WATCHDOG = (
    "[rank3]:[E1123 10:00:00.123 ProcessGroupNCCL.cpp:2105] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group "
    "watchdog thread terminated with exception: CUDA error: "
)
# Verbatim: pytorch/pytorch#113128, NVIDIA/nccl-tests#230, wilicc/gpu-burn#1, rwth-i6/returnn#1486, torch/cutorch#197
PUBLISHED = [
    (
        "[default0]:[rank12]:[E817 17:40:34.227531918 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 12] Process "
        "group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered",
        DeviceFault.MEMORY,
    ),
    (
        "DESKTOP-GGBQPHK:64756:64771 [0] include/alloc.h:123 NCCL WARN Cuda failure 999 'unknown error'",
        DeviceFault.UNCLEAR,
    ),
    ("[74889.644138] NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.", DeviceFault.GPU),
    ("Unable to determine the device handle for GPU0000:03:00.0: Unknown Error", DeviceFault.GPU),
    (
        "luajit: cuda runtime error (30) : unknown error at /tmp/luarocks_cutorch-scm-1-9927/cutorch/lib/THC/"
        "THCStorage.c:113",
        DeviceFault.UNCLEAR,
    ),
]
LINES = [
    *PUBLISHED,
    ("NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus.", DeviceFault.GPU),
    ("NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.", DeviceFault.GPU),
    ("NVRM: GPU 0000:4f:00.0: RmInitAdapter failed! (0x62:0xffff:2351)", DeviceFault.GPU),
    ("n1:8:9 [0] misc/nvmlwrap.cc:190 NCCL WARN nvmlDeviceGetHandleByIndex(0) failed: GPU is lost", DeviceFault.GPU),
    ("NVRM: Xid (PCI:0000:1b:00): 64, row remapper failure", DeviceFault.GPU),
    (f"{TORCH}uncorrectable ECC error encountered", DeviceFault.MEMORY),
    (f"{WATCHDOG}uncorrectable ECC error encountered", DeviceFault.MEMORY),
    ("[rank3]: Search for `cudaErrorECCUncorrectable' in https://docs.nvidia.com/cuda", DeviceFault.MEMORY),
    ("n1:8:9 [3] enqueue.cc:98 NCCL WARN Cuda failure 214 'uncorrectable ECC error encountered'", DeviceFault.MEMORY),
    (
        "kernel: NVRM: Xid (PCI:0000:65:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error "
        "(DBE) has been detected on GPU",
        DeviceFault.MEMORY,
    ),
    ("NVRM: Xid (PCI:0000:1b:00): 95, pid=811, Uncontained memory error", DeviceFault.MEMORY),
    ("NVRM: Xid (PCI:0000:1b:00): 94, pid=811, Contained memory error", DeviceFault.CONTAINED),
    (f"{TORCH}Invalid access of peer GPU memory over nvlink or a hardware error", DeviceFault.CONTAINED),
    ("NVRM: Xid (PCI:0000:cd:00): 74, pid=3212, NVLink: fatal error detected on link 5", DeviceFault.NVLINK),
    ("NVRM: Xid (PCI:0009:01:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 00", DeviceFault.NVLINK),
    (f"{TORCH}uncorrectable NVLink error detected during the execution", DeviceFault.NVLINK),
    ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", DeviceFault.NVLINK),
    ("NVRM: Xid (PCI:0000:1b:00): 119, pid=1, Timeout after 6s of waiting for RPC response", DeviceFault.RESET),
    ("NVRM: Xid (PCI:0000:1b:00): 167, pid=1, a number of a newer driver", DeviceFault.RESET),
    (
        "NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        DeviceFault.RESET,
    ),
    ("GPU 5 is in an error state: GPU requires reset", DeviceFault.RESET),
    (f"{TORCH}system not yet initialized", DeviceFault.NOT_READY),
    (f"{TORCH}unspecified launch failure", DeviceFault.UNCLEAR),
    (f"{TORCH}unknown error", DeviceFault.UNCLEAR),
    (f"{TORCH}CUDA-capable device(s) is/are busy or unavailable", DeviceFault.UNCLEAR),
    (
        "mlx5_core 0000:1a:00.0: poll_health:825:(pid 0): device's health compromised - reached miss count",
        DeviceFault.NIC,
    ),
    (
        "n1:8:9 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error",
        DeviceFault.NIC_LINK_DOWN,
    ),
    ("mlx5_core 0000:1a:00.0 ens1f0np0: Link down", DeviceFault.NIC_LINK_DOWN),
    (
        f"{DIST}unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
        DeviceFault.NCCL_SYSTEM,
    ),
    (f"{DIST}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5", DeviceFault.UNCLEAR),
    (f"{DIST}remote process exited or there was a network error, NCCL version 2.20.5", DeviceFault.NCCL_REMOTE),
    (
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        DeviceFault.NCCL_REMOTE,
    ),
]
PROGRAM_LINES = [
    f"{TORCH}an illegal memory access was encountered",
    f"{TORCH}device-side assert triggered",
    f"{TORCH}out of memory",
    f"{TORCH}invalid device ordinal",
    f"{TORCH}no kernel image is available for execution on the device",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "NVRM: Xid (PCI:0000:07:00): 31, pid=7192, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0",
    "NVRM: Xid (PCI:0000:07:00): 13, pid=7192, Graphics SM Warp Exception",
    "NVRM: Xid (PCI:0000:4f:00): 45, pid=8812, name=python, Ch 00000008",
    "NVRM: Xid (PCI:0000:07:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping",
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20009, Non-fatal, Link 04 RX Short Error Rate",
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007, Non-fatal, Link 08 sourcetrack timeout error",
    "n1:8:9 [0] NCCL INFO NET/IB : mlx5_3:1 Got async event : port active",
    "Double-bit ECC: 0",
    "ValueError: bad shape",
    "",
]


@pytest.mark.parametrize(("line", "fault"), LINES)
def test_line_reports_the_fault_of_a_device(line: str, fault: DeviceFault) -> None:
    assert device_fault(line) is fault


@pytest.mark.parametrize("line", PROGRAM_LINES)
def test_line_about_the_program_or_about_nothing_reports_no_fault_of_a_device(line: str) -> None:
    assert device_fault(line) is None


def test_every_fault_has_a_line() -> None:
    assert {fault for _, fault in LINES} == set(DeviceFault)


def test_rules_that_report_a_fault_exist() -> None:
    assert FAULT_OF_RULE.keys() <= RULES.keys()


def test_strongest_fault_of_several_lines_is_the_first_of_its_kind() -> None:
    nccl, cuda, first, second = (
        f"{DIST}unhandled cuda error",
        f"{TORCH}unspecified launch failure",
        "NVRM: Xid (PCI:0000:1b:00): 94, pid=811, Contained memory error",
        "NVRM: Xid (PCI:0000:1c:00): 94, pid=811, Contained memory error",
    )
    assert strongest_fault([nccl, "step 3", cuda, first, second]) == (first, DeviceFault.CONTAINED)
    assert strongest_fault(["step 3", "ValueError: bad shape"]) is None


def test_a_line_that_never_ends_is_searched_in_part() -> None:
    assert device_fault("x" * 5000 + f"{TORCH}unknown error") is None


def test_texts_of_cuda_errors_are_those_of_the_library() -> None:
    spec = find_spec("nvidia")
    libraries = [
        path
        for folder in (spec.submodule_search_locations or () if spec else ())
        for path in Path(folder).rglob("libcudart.so*")
    ]
    if not libraries:
        pytest.skip("no CUDA runtime is installed")
    library = ctypes.CDLL(str(libraries[0]))
    library.cudaGetErrorString.restype = library.cudaGetErrorName.restype = ctypes.c_char_p
    for row in ERRORS:
        known = library.cudaGetErrorName(row.number).decode(), library.cudaGetErrorString(row.number).decode()
        assert (f"cudaError{row.runtime}", row.text) == known
