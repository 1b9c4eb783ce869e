"""Measures a CPU's rates in the parts of a training step, while the node's other ranks do the same.

Each part is a forward and a backward pass, repeated for a fixed time, so that all ranks are busy with the same part.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.events.probe_results import TrainingRates, WidthRate

WIDTHS = (128, 256, 512, 1024)
ROWS = 1024
"""Tokens of a micro-batch."""
SEQUENCES, LENGTH, HEADS, HEAD_DIM = 4, 256, 4, 64
TRAINING = 3
"""Products of a forward and a backward pass over those of the forward pass."""
ELEMENTS = 1 << 20
"""Of an activation: 4 MiB."""
GATED_BYTES = 56
"""Memory traffic per element of `silu(a) * b`: 20 in the forward pass, 36 in the backward pass."""
TENSORS = 8
"""Of as many parameters each: their states, 128 MiB in all, do not stay in a cache from one step to the next."""
TINY_OPERATIONS = 8


def training_rates(seconds: float) -> TrainingRates:
    """The rates of this process, in about so many seconds."""
    each_s = seconds / (len(WIDTHS) + 4)
    with torch.enable_grad():
        widths = tuple(
            WidthRate(width=width, tflop_s=TRAINING * 2 * ROWS * width**2 / _mean_s(_product(width), each_s) / 1e12)
            for width in WIDTHS
        )
        pairs = SEQUENCES * HEADS * LENGTH**2 / 2
        return TrainingRates(
            products=widths,
            attention_tflop_s=TRAINING * 4 * pairs * HEAD_DIM / _mean_s(_attention(), each_s) / 1e12,
            elementwise_gb_s=GATED_BYTES * ELEMENTS / _mean_s(_gated(ELEMENTS), each_s) / 1e9,
            adamw_s=_mean_s(_adamw(), each_s) / (TENSORS * ELEMENTS),
            operation_s=_mean_s(_tiny, each_s) / (TRAINING * TINY_OPERATIONS),
        )


def _mean_s(work: Callable[[], object], seconds: float) -> float:
    """Mean seconds of a repetition: the fastest one had the CPU for itself, which training does not have."""
    work()
    began, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds or count < 2:
        work()
        count += 1
    return elapsed / count


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def _backward(output: Tensor, *inputs: Tensor) -> None:
    torch.autograd.grad(output, inputs, torch.ones_like(output))


def _product(width: int) -> Callable[[], object]:
    tokens, weight = _leaf(ROWS, width), _leaf(width, width)
    return lambda: _backward(F.linear(tokens, weight), tokens, weight)


def _attention() -> Callable[[], object]:
    query, key, value = (_leaf(SEQUENCES, HEADS, LENGTH, HEAD_DIM) for _ in range(3))
    return lambda: _backward(F.scaled_dot_product_attention(query, key, value, is_causal=True), query, key, value)


def _gated(elements: int) -> Callable[[], object]:
    gate, up = _leaf(elements), _leaf(elements)
    return lambda: _backward(F.silu(gate) * up, gate, up)


def _adamw() -> Callable[[], object]:
    parameters = [_leaf(ELEMENTS) for _ in range(TENSORS)]
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer = torch.optim.AdamW(parameters)

    def step() -> None:
        optimizer.step()

    return step


def _tiny() -> None:
    one = last = _leaf(1)
    for _ in range(TINY_OPERATIONS):
        last = last * one
    _backward(last, one)
