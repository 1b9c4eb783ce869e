"""Owns what accelerators can do at best: FLOP/s of dense matrix products, by kind of number, as their makers state it.

Figures of data sheets that count structured sparsity are halved. What is not in the table has no peak, and nothing is
claimed of it: a CPU has none, nor a slice of a GPU (MIG).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NVIDIA = "https://www.nvidia.com/en-us/data-center/"
AMPERE = f"{NVIDIA}a100/"
HOPPER = f"{NVIDIA}h100/"
BLACKWELL = "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703"
INSTINCT = "https://www.amd.com/en/products/accelerators/instinct/"
A10G = "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator; peaks in TFLOP/s, None where it lacks the kind of number."""

    name: str
    pattern: str
    """Regular expression that is found in what the driver calls it; the first row that fits is it."""
    bf16: float | None
    """fp16 has the same peak wherever there is one for bf16."""
    fp16: float | None = None
    """Where bf16 is lacking."""
    tf32: float | None = None
    fp8: float | None = None
    source: str

    @property
    def peak_tflops(self) -> float | None:
        """What utilisation is measured against: bf16, or fp16 where there is none; also for models in fp8 or fp32."""
        return self.bf16 or self.fp16


DEVICES: tuple[Device, ...] = (
    Device(name="B300", pattern=r"\bB300\b", bf16=2250, tf32=1125, fp8=4500, source=f"{NVIDIA}dgx-b300/"),
    Device(name="GB200", pattern=r"\bGB200\b", bf16=2500, tf32=1250, fp8=5000, source=f"{NVIDIA}gb200-nvl72/"),
    Device(name="B200", pattern=r"\bB200\b", bf16=2250, tf32=1125, fp8=4500, source=BLACKWELL),
    Device(name="H200 NVL", pattern=r"\bH200 NVL\b", bf16=835.5, tf32=417.5, fp8=1670.5, source=f"{NVIDIA}h200/"),
    Device(name="H200", pattern=r"\bG?H200\b", bf16=989.5, tf32=494.5, fp8=1979, source=f"{NVIDIA}h200/"),
    Device(name="H100 NVL", pattern=r"\bH100 NVL\b", bf16=835.5, tf32=417.5, fp8=1670.5, source=HOPPER),
    Device(name="H100 PCIe", pattern=r"\bH100 PCIe\b", bf16=756.5, tf32=378, fp8=1513, source=HOPPER),
    Device(name="H100 SXM", pattern=r"\bH100\b", bf16=989.5, tf32=494.5, fp8=1979, source=HOPPER),
    Device(name="A100", pattern=r"\bA100\b", bf16=312, tf32=156, source=AMPERE),
    Device(name="L40S", pattern=r"\bL40S\b", bf16=362, tf32=183, fp8=733, source=f"{NVIDIA}l40s/"),
    Device(name="L4", pattern=r"\bL4\b", bf16=121, tf32=60, fp8=242.5, source=f"{NVIDIA}l4/"),
    Device(name="A10G", pattern=r"\bA10G\b", bf16=70, tf32=35, source=A10G),
    Device(name="A10", pattern=r"\bA10\b", bf16=125, tf32=62.5, source=f"{NVIDIA}products/a10-gpu/"),
    Device(name="A40", pattern=r"\bA40\b", bf16=149.7, tf32=74.8, source=f"{NVIDIA}a40/"),
    Device(name="V100", pattern=r"\bV100\b", bf16=None, fp16=125, source=f"{NVIDIA}v100/"),
    Device(name="T4", pattern=r"\bT4\b", bf16=None, fp16=65, source=f"{NVIDIA}tesla-t4/"),
    Device(name="MI355X", pattern=r"\bMI355X\b", bf16=2516.6, fp8=5033.2, source=f"{INSTINCT}mi350/mi355x.html"),
    Device(name="MI325X", pattern=r"\bMI325X\b", bf16=1307.4, tf32=653.7, fp8=2614.9, source=f"{INSTINCT}mi300.html"),
    Device(name="MI300X", pattern=r"\bMI300X\b", bf16=1307.4, tf32=653.7, fp8=2614.9, source=f"{INSTINCT}mi300.html"),
    Device(name="MI250X (one die)", pattern=r"\bMI250X\b", bf16=191.5, source=f"{INSTINCT}mi200/mi250x.html"),
)  # fmt: skip


def find(name: str) -> Device | None:
    """The row for what a driver calls a device, such as `NVIDIA H100 80GB HBM3`; none where nothing is known of it."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((device for device in DEVICES if re.search(device.pattern, name)), None)
