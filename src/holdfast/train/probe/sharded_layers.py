"""Measures what FSDP2 takes on CPUs for each layer: to gather its weights twice, and to reduce its gradients."""

from __future__ import annotations

import time
from datetime import timedelta
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.events.probe_results import ShardedRates
from holdfast.train.probe.process_groups import StoreAddress

LAYERS, TENSORS = 4, 8
WIDTHS = (16, 384)
"""Of square weights: in layers of 2,000 parameters, and of 1.2 million."""


class _Layer(nn.Module):
    """Weights with gradients, which are hardly computed with: a forward and backward pass takes 3 % of FSDP2's time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(width, width)) for _ in range(TENSORS))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([each.sum() for each in self.weights]).sum()


def sharded_rates(
    address: StoreAddress, steps: int, name: str, index: int, size: int, timeout_s: float
) -> ShardedRates:
    """What this process, number `index` of a group, takes in so many steps after the first.

    The group is torch's default one meanwhile, because FSDP2 knows no other.
    """
    store = dist.PrefixStore(f"probe/sharded/{name}", address.client(timeout_s))
    dist.init_process_group("gloo", store=store, rank=index, world_size=size, timeout=timedelta(seconds=timeout_s))
    with torch.enable_grad():
        small_s, large_s = (_layer_s(width, steps) for width in WIDTHS)
    dist.destroy_process_group()
    small, large = (TENSORS * width**2 for width in WIDTHS)
    parameter_s = max(0.0, large_s - small_s) / (large - small)
    return ShardedRates(layer_s=small_s, parameter_s=parameter_s)


def _layer_s(width: int, steps: int) -> float:
    """Mean seconds of a layer's forward and backward pass."""
    from torch.distributed.fsdp import fully_shard  # takes 0.4 s, which probes of GPUs need not wait for

    model = nn.Sequential(*(_Layer(width) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    taken: list[float] = []
    for _ in range(1 + steps):
        dist.barrier()
        began = time.perf_counter()
        model(torch.ones(1)).backward()
        taken.append(time.perf_counter() - began)
        model.zero_grad()
    return fmean(taken[1:]) / LAYERS
