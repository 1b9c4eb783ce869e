"""Burns a device in with matrix products whose bit-exact results are known in advance, and measures its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.events.probe_results import MatmulRate

PERIOD = 56
"""Rows and columns after which the matrices repeat: no multiple of a kernel's tile, so that tiles differ."""
PERIODS = {"cuda": 64, "cpu": 8}
"""Repetitions along each side. Powers of two: the products then need no more significant bits."""
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
"""Larger than any cache."""
_HIGH_BITS = 1 << 33


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """Matrices of small integers, whose product is exact in any order of summation."""

    left: torch.Tensor
    right: torch.Tensor
    product: torch.Tensor


LARGEST = {torch.float32: 31, torch.bfloat16: 2}
"""The largest entry, by type, so that each product fits it: |sum| < 2^24, TF32 included; bfloat16 has 8 bits, and
56 · 2 · 2 = 224 is less than 2^8."""


DTYPES = {"cuda": tuple(LARGEST), "cpu": (torch.float32,)}
"""The types that a device is burned in with. No bfloat16 on a CPU: in some virtual machines the kernels that oneDNN
chooses for it end the process with an illegal instruction (uxlfoundation/oneDNN issue 5689), and no job needs them."""


def operands(dtype: torch.dtype, periods: int, device: torch.device) -> Operands:
    """Square matrices of PERIOD · periods rows, which repeat in both directions.

    With left[i, k] = f(i + k), right[k, j] = g(k + j) and f, g of period PERIOD, product[i, j] is `periods` times the
    sum over one period, which depends on i and j modulo PERIOD only: integers computed in Python say what it is.
    """
    largest = LARGEST[dtype]
    left, right = _sequence(1, largest), _sequence(2, largest)
    around = range(PERIOD)
    table = [
        [periods * sum(left[(i + k) % PERIOD] * right[(k + j) % PERIOD] for k in around) for j in around]
        for i in around
    ]
    shifted = [[[each[(i + j) % PERIOD] for j in around] for i in around] for each in (left, right)]

    def tiled(tile: list[list[int]]) -> torch.Tensor:
        return torch.tensor(tile, dtype=dtype, device=device).repeat(periods, periods)

    return Operands(left=tiled(shifted[0]), right=tiled(shifted[1]), product=tiled(table))


def _sequence(seed: int, largest: int) -> list[int]:
    """Integers from -largest to largest, the same on every machine: a linear congruential generator's high bits."""
    state, values = seed, list[int]()
    for _ in range(PERIOD):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        values.append(state // _HIGH_BITS % (2 * largest + 1) - largest)
    return values


def burn_in(
    device: torch.device, seconds: float, *, multiply: Callable[..., torch.Tensor] = torch.mm
) -> tuple[MatmulRate, ...]:
    """Multiply for some seconds, with each type for its share, and compare every product."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # would round partial sums
    dtypes = DTYPES[device.type]
    return tuple(_burn_in(dtype, device, seconds / len(dtypes), multiply) for dtype in dtypes)


def _burn_in(
    dtype: torch.dtype, device: torch.device, seconds: float, multiply: Callable[..., torch.Tensor]
) -> MatmulRate:
    given = operands(dtype, PERIODS[device.type], device)
    result = torch.empty_like(given.product)
    products = wrong = 0
    fastest_s = float("inf")
    deadline = time.monotonic() + seconds
    while products < 2 or time.monotonic() < deadline:  # the first one loads the kernel
        began = time.perf_counter()
        multiply(given.left, given.right, out=result)
        synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - began)
        products += 1
        wrong += not torch.equal(result, given.product)
    tflop_s = 2 * len(result) ** 3 / fastest_s / 1e12
    return MatmulRate(dtype=str(dtype).removeprefix("torch."), tflop_s=tflop_s, products=products, wrong=wrong)


def copy_rate(device: torch.device, seconds: float, size_bytes: int | None = None) -> tuple[float, int]:
    """GB/s read and written by the fastest copy in a device's memory, and how many copies were not bit-exact."""
    source = torch.arange((size_bytes or COPY_BYTES[device.type]) // 8, device=device)
    target = torch.empty_like(source)
    copies = wrong = 0
    fastest_s = float("inf")
    deadline = time.monotonic() + seconds
    while copies < 2 or time.monotonic() < deadline:
        target.zero_()
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - began)
        copies += 1
        wrong += not torch.equal(source, target)
    return 2 * source.nbytes / fastest_s / 1e9, wrong


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work; the CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
