"""Machines by name: GPUs, the links that join them, the network, and the share of each that programs reach.

Rates are per GPU and direction. Bus bandwidths of large all-reduces set the shares of links and networks; shares of the
GPUs' peaks are fitted with step_time.py's constants (`python -m bench.plan_accuracy`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import asdict, fields, replace

from holdfast.events.probe_results import DataParallelRates
from holdfast.metrics.devices import DEVICES, Device

GB = 1e9
TERA = 1e12
CPU = "cpu"
"""Name of a machine without GPUs: it has no rates but those of a calibration."""
_PEAKS = {device.name: device for device in DEVICES}


class Gpu(Struct, frozen=True, kw_only=True):
    """A GPU; `source` is the data sheet of its memory and link."""

    name: str
    peak: Device
    memory_bytes: float
    memory_rate: float
    """Peak of its memory, in bytes/s."""
    matmul: float
    """Share of the bf16 peak that large products reach."""
    matmul_fp8: float | None = None
    """Share of the fp8 peak; None if it has no fp8."""
    attention: float
    """Share of the bf16 peak that the forward pass of causal attention reaches in the vendor's kernels."""
    attention_portable: float
    """The same for FlashAttention 2, which PyTorch brings."""
    attention_early: float
    """The same for the first generation of FlashAttention."""
    memory: float = 0.856
    """Share of the memory's peak that elementwise kernels reach."""
    source: str


class CpuRates(Struct, frozen=True, kw_only=True):
    """Rates of one rank's share of a CPU in training, while all ranks of the node compute."""

    products: Mapping[int, float]
    """FLOP/s of linear layers by width, narrowest first."""
    adamw_s: float
    """Seconds of an optimizer step per parameter."""
    operation_s: float
    """Seconds of an operation on one element."""
    data_parallel: DataParallelRates | None = None
    """Among the ranks of a node; None: not measured."""

    def product_rate(self, width: float) -> float:
        """FLOP/s at a width, between the measured ones along its logarithm."""
        widths = [*self.products]
        below = max((each for each in widths if each <= width), default=widths[0])
        above = min((each for each in widths if each >= width), default=widths[-1])
        if below >= above:
            return self.products[above if width <= above else below]
        share = math.log(width / below) / math.log(above / below)
        return (1 - share) * self.products[below] + share * self.products[above]


class Machine(Struct, frozen=True, kw_only=True):
    """A kind of node and its network."""

    name: str
    gpu: Gpu
    domain: int = 8
    """GPUs that the fast link joins."""
    link: str
    link_rate: float
    """Bus bandwidth of a large all-reduce over the link, in bytes/s per GPU."""
    network: str
    network_rate: float
    """The same across nodes, if one GPU per node takes part."""
    measured: tuple[str, ...] = ()
    """What a calibration has replaced."""
    source: str = ""
    cpu: CpuRates | None = None
    """Of a machine without GPUs, whose ranks compute in fp32 and communicate with Gloo."""


class Calibration(Struct, frozen=True, kw_only=True):
    """Measured rates of a user's nodes, which replace the catalogue's; None where nothing was measured.

    `matmul_tflops` is of large bf16 products, `memory_gb_s` of copies in a GPU's memory, `link_gb_s` and `network_gb_s`
    are bus bandwidths of large all-reduces within a node and across nodes, per GPU.
    """

    matmul_tflops: float | None = None
    memory_gb_s: float | None = None
    link_gb_s: float | None = None
    network_gb_s: float | None = None


class CpuCalibration(Struct, frozen=True, kw_only=True):
    """Measured rates of a node without GPUs, each of one of its ranks while all compute."""

    ranks_per_node: int
    rates: CpuRates
    attention_tflops: float
    elementwise_gb_s: float
    copy_gb_s: float
    link_gb_s: float | None
    """Bus bandwidth of an all-reduce among the node's ranks; None for one rank."""
    network_gb_s: float | None
    """The same across nodes, per rank; None for one node."""


def cpu_machine(found: CpuCalibration) -> Machine:
    """A machine whose rates are all measured; its memory is not, so that every layout fits."""
    peak = max(found.rates.products.values())
    attention = found.attention_tflops * TERA / peak
    gpu = Gpu(
        name="CPU",
        peak=Device(name="CPU", pattern="CPU", bf16=peak / TERA, stated="measured", source="calibration"),
        memory_bytes=math.inf,
        memory_rate=found.copy_gb_s * GB,
        memory=found.elementwise_gb_s / found.copy_gb_s,
        matmul=1.0,
        attention=attention,
        attention_portable=attention,
        attention_early=attention,
        source="calibration",
    )
    link, network = found.link_gb_s, found.network_gb_s
    return Machine(
        name=CPU,
        gpu=gpu,
        domain=found.ranks_per_node,
        link="memory",
        link_rate=(link or math.inf) * GB,
        network="as measured",
        network_rate=(network or math.inf) * GB,
        measured=tuple(field.name for field in fields(Calibration)),
        source="calibration",
        cpu=found.rates,
    )


def calibrated(machine: Machine, found: Calibration) -> Machine:
    """The machine with measured rates."""
    gpu, names = machine.gpu, [name for name, value in asdict(found).items() if value is not None]
    peak = gpu.peak.peak_tflops
    if found.matmul_tflops and peak:
        share = found.matmul_tflops / peak
        fp8 = None if gpu.matmul_fp8 is None else gpu.matmul_fp8 * share / gpu.matmul
        gpu = replace(gpu, matmul=share, matmul_fp8=fp8)
    if found.memory_gb_s:
        gpu = replace(gpu, memory=found.memory_gb_s * GB / gpu.memory_rate)
    return replace(
        machine,
        gpu=gpu,
        link_rate=found.link_gb_s * GB if found.link_gb_s else machine.link_rate,
        network_rate=found.network_gb_s * GB if found.network_gb_s else machine.network_rate,
        measured=tuple(names),
    )


_A100 = Gpu(
    name="A100 80GB",
    peak=_PEAKS["A100"],
    memory_bytes=80 * GB,
    memory_rate=2039 * GB,
    matmul=0.761,
    attention=0.65,
    attention_portable=0.791,
    attention_early=0.357,
    source="https://www.nvidia.com/en-us/data-center/a100/",
)
_H100 = Gpu(
    name="H100 SXM",
    peak=_PEAKS["H100 SXM"],
    memory_bytes=80 * GB,
    memory_rate=3350 * GB,
    matmul=0.594,
    matmul_fp8=0.65,
    attention=0.7,
    attention_portable=0.362,
    attention_early=0.197,
    source="https://www.nvidia.com/en-us/data-center/h100/",
)
_LIMITED = 0.845
"""Share of its rates that an H100 reaches at 500 of 700 W: the clock falls about with the square root of the power."""
_H100_500W = replace(
    _H100,
    name="H100 500W",
    memory_bytes=96 * GB,
    memory_rate=2400 * GB,
    matmul=_H100.matmul * _LIMITED,
    matmul_fp8=(_H100.matmul_fp8 or 0.0) * _LIMITED,
    attention=_H100.attention * _LIMITED,
    attention_portable=_H100.attention_portable * _LIMITED,
    attention_early=_H100.attention_early * _LIMITED,
    source="https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
)
_H200 = replace(
    _H100,
    name="H200",
    peak=_PEAKS["H200"],
    memory_bytes=141 * GB,
    memory_rate=4800 * GB,
    source="https://www.nvidia.com/en-us/data-center/h200/",
)
_B200 = Gpu(
    name="B200",
    peak=_PEAKS["B200"],
    memory_bytes=180 * GB,
    memory_rate=7700 * GB,
    matmul=0.706,
    matmul_fp8=0.519,
    attention=0.518,
    attention_portable=0.18,
    attention_early=0.1,
    source="https://www.nvidia.com/en-us/data-center/dgx-b200/",
)
_GB200 = replace(_B200, name="GB200", peak=_PEAKS["GB200"], memory_bytes=186 * GB, memory_rate=8000 * GB)
_B300 = replace(
    _B200,
    name="B300",
    peak=_PEAKS["B300"],
    memory_bytes=270 * GB,
    memory_rate=8000 * GB,
    matmul=0.95,
    matmul_fp8=0.806,
)
_GB300 = replace(_GB200, name="GB300", memory_bytes=279 * GB, matmul=0.95, matmul_fp8=0.806)
# No published run was compared with MI300X: its shares are estimates.
_MI300X = Gpu(
    name="MI300X",
    peak=_PEAKS["MI300X"],
    memory_bytes=192 * GB,
    memory_rate=5300 * GB,
    matmul=0.50,
    matmul_fp8=0.42,
    attention=0.30,
    attention_portable=0.30,
    attention_early=0.15,
    source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
)

# Shares of a link's or network's rate: 365 of 450 GB/s on 8x H200 and 682 of 900 GB/s on 8x B200 without NVLS
# (stas00/ml-engineering, network/README.md); 331 of 400 Gbit/s on 4x 8 H100 with NDR; 92 of 100 Gbit/s for Ethernet of
# one flow per adapter is not reached by TCP, which one core copies.
_NVLINK, _NVLINK_5, _RDMA, _TCP = 0.81, 0.757, 0.83, 0.5


def _machine(name: str, gpu: Gpu, link: str, link_gb_s: float, network: str, network_gb_s: float) -> Machine:
    share = _NVLINK_5 if link == "NVLink 5" else _NVLINK
    reached = _TCP if "TCP" in network else _RDMA
    return Machine(
        name=name,
        gpu=gpu,
        link=link,
        link_rate=link_gb_s * share * GB,
        network=network,
        network_rate=network_gb_s * reached * GB,
        source=gpu.source,
    )


_ROWS = (
    _machine("a100-hdr", _A100, "NVLink 3", 300, "InfiniBand HDR, 200 Gbit/s per GPU", 25),
    _machine("a100-400g", _A100, "NVLink 3", 300, "RoCE or EFA, 400 Gbit/s per node", 6.25),
    _machine(
        "a100-40gb-hdr",
        replace(_A100, name="A100 40GB", memory_bytes=40 * GB, memory_rate=1555 * GB),
        "NVLink 3",
        300,
        "InfiniBand HDR, 200 Gbit/s per GPU",
        25,
    ),
    _machine("a100-pcie-100g", _A100, "PCIe 4", 25, "RoCE, 100 Gbit/s per node", 1.5625),
    _machine("h100-ndr", _H100, "NVLink 4", 450, "InfiniBand NDR, 400 Gbit/s per GPU", 50),
    _machine("h100-roce", _H100, "NVLink 4", 450, "RoCE, 400 Gbit/s per GPU", 50),
    _machine("h100-500w-roce", _H100_500W, "NVLink 4", 450, "RoCE, 400 Gbit/s per GPU", 50),
    _machine("h100-efa", _H100, "NVLink 4", 450, "EFA, 3,200 Gbit/s per node", 50),
    _machine("h100-800g", _H100, "NVLink 4", 450, "RoCE, 800 Gbit/s per node", 12.5),
    _machine("h100-100g-tcp", _H100, "NVLink 4", 450, "Ethernet with TCP, 100 Gbit/s per node", 1.5625),
    _machine("h100-10g-tcp", _H100, "NVLink 4", 450, "Ethernet with TCP, 10 Gbit/s per node", 0.15625),
    _machine("h200-ndr", _H200, "NVLink 4", 450, "InfiniBand NDR, 400 Gbit/s per GPU", 50),
    _machine("b200-ndr", _B200, "NVLink 5", 900, "InfiniBand NDR, 400 Gbit/s per GPU", 50),
    _machine("b300-xdr", _B300, "NVLink 5", 900, "InfiniBand XDR, 800 Gbit/s per GPU", 100),
    replace(_machine("gb200-ndr", _GB200, "NVLink 5", 900, "InfiniBand NDR, 400 Gbit/s per GPU", 50), domain=64),
    replace(
        _machine(
            "gb300-xdr",
            _GB300,
            "NVLink 5",
            900,
            "InfiniBand XDR, 800 Gbit/s per GPU",
            100,
        ),
        domain=64,
    ),
    _machine("mi300x-roce", _MI300X, "Infinity Fabric", 448, "RoCE, 400 Gbit/s per GPU", 50),
)

MACHINES: Mapping[str, Machine] = MappingProxyType({row.name: row for row in _ROWS})
"""All machines by name."""
