"""Nodes with GPUs, from recorded output of nvidia-smi and from boards of eight made of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

DATA = Path(__file__).with_name("data") / "gpu"
WORKSTATION = (DATA / "rtx-pro-6000-in-use.xml").read_text()
A100_MIG = (DATA / "a100-mig.xml").read_text()
A10G = (DATA / "a10g-aws.xml").read_text()
BRIDGED = (DATA / "nvlink-h100-pcie-bridged.txt").read_text()

SMI = "nvidia-smi -q -x"
NVLINK = "nvidia-smi nvlink -s"

# An H100 of an HGX board in the form that the workstation's driver prints: no recorded XML of a board was found. The
# fabric's values are those of `nvidia-smi -q` on a GB300 tray (NVIDIA/k8s-test-infra issue 677 and its documentation).
H100 = {
    "product_name": "NVIDIA H100 80GB HBM3",
    "current_mig": "Disabled",
    "current_ecc": "Enabled",
    "sram_uncorrectable_parity": "0",
    "sram_uncorrectable_secded": "0",
    "dram_uncorrectable": "0",
    "sram_threshold_exceeded": "No",
    "pending_retirement": "N/A",
    "used": "4 MiB",
    "sm_clock": "1980 MHz",
    "mem_clock": "2619 MHz",
    "current_power_limit": "700.00 W",
    "state": "Completed",
    "status": "Success",
    "summary": "Healthy",
    "bandwidth": "Full",
    "route_recovery_in_progress": "False",
    "route_unhealthy": "False",
    "access_timeout_recovery": "False",
    "incorrect_configuration": "None",
}
_GPU = re.compile(r"\t<gpu .*</gpu>\n", re.DOTALL)
_PROCESS = re.compile(r"\t\t\t<process_info>.*</process_info>\n", re.DOTALL)


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


def board(changes: Mapping[int, Mapping[str, str]] | None = None, *, gpus: int = 8, process: str = "") -> str:
    """The XML of a healthy board, except for the fields changed by the GPU's index; a `process` is added to GPU 0."""
    found = _GPU.search(WORKSTATION)
    assert found
    blocks = [_gpu(found[0], index, (changes or {}).get(index, {})) for index in range(gpus)]
    blocks[0] = blocks[0].replace("<processes>", f"<processes>{process}")
    return _GPU.sub("".join(blocks), WORKSTATION)


def process(kind: str, used: str, name: str = "python") -> str:
    return (
        f"<process_info><pid>4121</pid><type>{kind}</type><process_name>{name}</process_name>"
        f"<used_memory>{used}</used_memory></process_info>"
    )


def links(inactive: Mapping[int, frozenset[int]] | None = None, *, gpus: int = 8, count: int = 18) -> str:
    """The links of a board, all active except those named by the GPU's index."""
    return "".join(
        f"GPU {index}: NVIDIA H100 80GB HBM3 (UUID: {uuid(index)})\n"
        + "".join(
            f"         Link {link}: {'<inactive>' if link in (inactive or {}).get(index, ()) else '26.562 GB/s'}\n"
            for link in range(count)
        )
        for index in range(gpus)
    )


def _gpu(block: str, index: int, changes: Mapping[str, str]) -> str:
    values = {**H100, "uuid": uuid(index), "minor_number": str(index), **changes}
    block = _PROCESS.sub("", block).replace("00000000:61:00.0", f"00000000:{index + 0x19:02X}:00.0")
    for tag, value in values.items():
        block, replaced = re.subn(rf"<{tag}>[^<]*</{tag}>", f"<{tag}>{value}</{tag}>", block)
        assert replaced, tag
    return block
