"""What `holdfast.train.probe` measures of this machine: matrix products, memory, and all-reduces between its GPUs.

One rank on each GPU, over NCCL; in CI two on the CPU, over Gloo.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.promises import PROBE_ALL_REDUCE, PROBE_MATMUL, PROBE_MEMORY, TWO_GPUS
from bench.gpu.section import Place, measured, skipped
from bench.probe_ranks import run_ranks
from bench.replica_program import free_port
from bench.result_file import Figure, Result
from holdfast.events.probe_results import AllReduceRate, DeviceRates, MatmulRate, ProbeResult
from holdfast.train.probe import matmul

DEADLINE_S = 120.0
BURN_IN_S, TINY_BURN_IN_S = 4.0, 0.01
TINY_RANKS, TINY_BYTES = 2, 1 << 18
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


def measure(place: Place) -> Iterator[Result]:
    """Run the probe once on all devices."""
    ranks = TINY_RANKS if place.device.kind == "cpu" else torch.cuda.device_count()
    arguments = ("--backend=gloo" if place.device.kind == "cpu" else "--backend=nccl",)
    arguments += (f"--burn-in-s={TINY_BURN_IN_S if place.tiny else BURN_IN_S:g}",)
    arguments += (f"--most-bytes={TINY_BYTES}",) if place.tiny else ()
    result = run_ranks(
        arguments,
        nodes=1,
        ranks_per_node=ranks,
        master=("127.0.0.1", free_port()),
        folder=place.folder,
        deadline_s=DEADLINE_S,
        prepare=lambda _: _prepare(place),
    )
    yield from results(result, ranks, DTYPES[place.device.kind])


def _prepare(place: Place) -> None:
    if place.device.kind == "cpu":
        torch.set_num_threads(1)
        matmul.COPY_BYTES["cpu"] = TINY_BYTES


def results(result: ProbeResult, ranks: int, dtype: str) -> Iterator[Result]:
    """The claims by what rank 0 of the probe has printed; the slowest device is a claim's figure."""
    if not result.devices:
        raise RuntimeError(f"the probe has no results: {result.problem or result.suspects}")
    conditions = f"{ranks} × {result.devices[0].device.partition(' (')[0]}, {result.elapsed_s:.0f} s for all probes"
    suspects = "; ".join(f"{each.stage}: {', '.join(each.evidence)}" for each in result.suspects)
    details = {"suspects": suspects} if suspects else {}
    products = [(device, each) for device in result.devices for each in device.matmul if each.dtype == dtype]
    yield _matmul(products, conditions, details)
    slowest = min(each.copy_gb_s for each in result.devices)
    wrong = sum(each.wrong_copies for each in result.devices)
    yield measured(
        PROBE_MEMORY,
        Figure(value=slowest, unit="GB/s"),
        goal="0 wrong",
        met=not wrong and slowest > 0,
        conditions=conditions,
        details=details | {"wrong copies": str(wrong)},
    )
    rates = next((each.rates for each in result.node_all_reduce), ())
    yield (
        _all_reduce(rates, conditions, details)
        if rates
        else skipped(PROBE_ALL_REDUCE, TWO_GPUS if ranks == 1 else "no all-reduce was measured")
    )


def _matmul(products: list[tuple[DeviceRates, MatmulRate]], conditions: str, details: dict[str, str]) -> Result:
    rates = [each.tflop_s for _, each in products]
    wrong = sum(each.wrong for _, each in products)
    return measured(
        PROBE_MATMUL,
        Figure(value=min(rates), unit="TFLOP/s", decimals=1),
        goal="0 wrong",
        met=not wrong,
        conditions=conditions,
        details=details
        | {
            "products": f"{sum(each.products for _, each in products):,}",
            "wrong": str(wrong),
            "fastest device": f"{max(rates):.1f} TFLOP/s",
            "in fp32": f"{min(_rates_of(products, 'float32')):.1f} TFLOP/s",
        },
    )


def _rates_of(products: list[tuple[DeviceRates, MatmulRate]], dtype: str) -> list[float]:
    return [each.tflop_s for device, _ in products for each in device.matmul if each.dtype == dtype]


def _all_reduce(rates: tuple[AllReduceRate, ...], conditions: str, details: dict[str, str]) -> Result:
    largest, smallest = max(rates, key=lambda each: each.size_bytes), min(rates, key=lambda each: each.size_bytes)
    wrong = sum(each.wrong for each in rates)
    return measured(
        PROBE_ALL_REDUCE,
        Figure(value=largest.bus_gb_s, unit="GB/s", decimals=2),
        goal="0 wrong",
        met=not wrong,
        conditions=conditions,
        details=details
        | {
            "largest": f"{largest.size_bytes >> 10:,} KiB in {largest.time_s * 1e3:.2f} ms",
            "smallest": f"{smallest.size_bytes} B in {smallest.time_s * 1e6:.0f} µs",
        },
    )
