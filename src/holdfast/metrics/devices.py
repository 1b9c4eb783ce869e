"""Peak FLOP/s of accelerators for dense matrix products, by data type, as stated by their vendors.

Data-sheet figures with structured sparsity are halved; `stated` is the data sheet's figure for bf16 (or fp16). Sources
that are links were compared with a second quote of the same page (TorchTitan's table of peaks, 2025). Named data sheets
were compared with third-party tables for B300, GB200, L40S, L4 and A40 (bf16 only). For V100, T4, A10, A10G and MI355X,
whose data sheets were not available, the figures were compared with units times peak clock (`Device.arithmetic`).
Devices not in the table, such as CPUs and MIG slices, have no peak and get no MFU.
"""

from __future__ import annotations

import re

from msgspec import Struct

NVIDIA = "https://www.nvidia.com/en-us/data-center/"
BLACKWELL = "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703"
INSTINCT = "https://www.amd.com/en/products/accelerators/instinct/"


class Device(Struct, frozen=True, kw_only=True):
    """One accelerator; peaks in TFLOP/s, None for unsupported data types."""

    name: str
    pattern: str
    """Regular expression for the driver's device name; the first matching row applies."""
    bf16: float | None
    """Peak for bf16; fp16 has the same peak."""
    fp16: float | None = None
    """Peak for fp16 on devices without bf16."""
    tf32: float | None = None
    fp8: float | None = None
    stated: str
    """The vendor's figure behind the peak, and whether it counts sparsity."""
    source: str
    """Source of the figure: a link, or a data sheet's name and year."""
    arithmetic: tuple[int, int, float] | None = None
    """Units (SMs, CUs), FLOP per unit and clock, peak clock in GHz; set if the peak was checked with them."""

    @property
    def peak_tflops(self) -> float | None:
        """Reference for MFU: bf16, else fp16; also for models in fp8 or fp32."""
        return self.bf16 or self.fp16


DEVICES: tuple[Device, ...] = (
    Device(
        name="B300", pattern=r"\bB300\b", bf16=2250, tf32=1125, fp8=4500,
        stated="36 PFLOPS of eight, sparse", source="NVIDIA HGX B300 data sheet, 2025",
    ),
    Device(
        name="GB200", pattern=r"\bGB200\b", bf16=2500, tf32=1250, fp8=5000,
        stated="5 PFLOPS, sparse", source="NVIDIA GB200 NVL72 data sheet, 2024",
    ),
    Device(
        name="B200", pattern=r"\bB200\b", bf16=2250, tf32=1125, fp8=4500,
        stated="4.5 PFLOPS, sparse", source=BLACKWELL,
    ),
    Device(
        name="H200 NVL", pattern=r"\bH200 NVL\b", bf16=835.5, tf32=417.5, fp8=1670.5,
        stated="1,671, sparse", source=f"{NVIDIA}h200/",
    ),
    Device(
        name="H200", pattern=r"\bG?H200\b", bf16=989.5, tf32=494.5, fp8=1979,
        stated="1,979, sparse", source=f"{NVIDIA}h200/",
    ),
    Device(
        name="H100 NVL", pattern=r"\bH100 NVL\b", bf16=835.5, tf32=417.5, fp8=1670.5,
        stated="1,671, sparse", source=f"{NVIDIA}h100/",
    ),
    Device(
        name="H100 PCIe", pattern=r"\bH100 PCIe\b", bf16=756.5, tf32=378, fp8=1513,
        stated="1,513, sparse", source=f"{NVIDIA}h100/",
    ),
    Device(
        name="H100 SXM", pattern=r"\bH100\b", bf16=989.5, tf32=494.5, fp8=1979,
        stated="1,979, sparse", source=f"{NVIDIA}h100/",
    ),
    Device(
        name="A100", pattern=r"\bA100\b", bf16=312, tf32=156,
        stated="312, dense", source=f"{NVIDIA}a100/",
    ),
    Device(
        name="L40S", pattern=r"\bL40S\b", bf16=362, tf32=183, fp8=733,
        stated="362.05, dense", source="NVIDIA L40S data sheet, 2023",
    ),
    Device(
        name="L4", pattern=r"\bL4\b", bf16=121, tf32=60, fp8=242.5,
        stated="242, sparse", source="NVIDIA L4 data sheet, 2023",
    ),
    Device(
        name="A10G", pattern=r"\bA10G\b", bf16=70, tf32=35,
        stated="70, dense", source="NVIDIA A10G data sheet for AWS, 2022", arithmetic=(80, 512, 1.71),
    ),
    Device(
        name="A10", pattern=r"\bA10\b", bf16=125, tf32=62.5,
        stated="125, dense", source="NVIDIA A10 data sheet, 2021", arithmetic=(72, 1024, 1.695),
    ),
    Device(
        name="A40", pattern=r"\bA40\b", bf16=149.7, tf32=74.8,
        stated="149.7, dense", source="NVIDIA A40 data sheet, 2021",
    ),
    Device(
        name="V100", pattern=r"\bV100\b", bf16=None, fp16=125,
        stated="125, dense; SXM2", source="NVIDIA V100 data sheet, 2020", arithmetic=(80, 1024, 1.53),
    ),
    Device(
        name="T4", pattern=r"\bT4\b", bf16=None, fp16=65,
        stated="65, dense", source="NVIDIA T4 data sheet, 2019", arithmetic=(40, 1024, 1.59),
    ),
    Device(
        name="MI355X", pattern=r"\bMI355X\b", bf16=2516.6, fp8=5033.2,
        stated="2.5 PFLOPS, dense", source="AMD Instinct MI355X data sheet, 2025", arithmetic=(256, 4096, 2.4),
    ),
    Device(
        name="MI325X", pattern=r"\bMI325X\b", bf16=1307.4, tf32=653.7, fp8=2614.9,
        stated="1,307.4, dense", source=f"{INSTINCT}mi300/mi325x.html",
    ),
    Device(
        name="MI300X", pattern=r"\bMI300X\b", bf16=1307.4, tf32=653.7, fp8=2614.9,
        stated="1,307.4, dense", source=f"{INSTINCT}mi300/mi300x.html",
    ),
    Device(
        name="MI250X (one die)", pattern=r"\bMI250X\b", bf16=191.5,
        stated="383 of two dies, dense", source=f"{INSTINCT}mi200/mi250x.html",
    ),
)  # fmt: skip


def find_device(name: str) -> Device | None:
    """The row for a driver's device name, such as `NVIDIA H100 80GB HBM3`; None if unknown."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((device for device in DEVICES if re.search(device.pattern, name)), None)
