"""Measures what DDP and FSDP2 take on CPUs in addition to the forward and backward pass."""

from __future__ import annotations

import time
from datetime import timedelta
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.events.probe_results import DataParallelRates
from holdfast.train.probe.process_groups import StoreAddress

LAYERS, TENSORS = 4, 8
WIDTHS = (16, 384)
"""Of square weights: in layers of 2,000 parameters, and of 1.2 million."""


class _Layer(nn.Module):
    """Weights with gradients, with which next to nothing is computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(width, width)) for _ in range(TENSORS))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([each.sum() for each in self.weights]).sum()


def data_parallel_rates(
    address: StoreAddress, steps: int, name: str, index: int, size: int, timeout_s: float
) -> DataParallelRates:
    """What this process, number `index` of a group, takes in so many steps after the first.

    The group is torch's default one meanwhile, because FSDP2 knows no other.
    """
    store = dist.PrefixStore(f"probe/data-parallel/{name}", address.client(timeout_s))
    dist.init_process_group("gloo", store=store, rank=index, world_size=size, timeout=timedelta(seconds=timeout_s))
    with torch.enable_grad():
        alone = [_layer_s(_layers(width), steps) for width in WIDTHS]
        ddp = [_layer_s(DistributedDataParallel(_layers(width)), steps) for width in WIDTHS]
        fsdp = [_layer_s(_sharded(_layers(width)), steps) for width in WIDTHS]
    dist.destroy_process_group()
    small, large = (TENSORS * width**2 for width in WIDTHS)
    return DataParallelRates(
        ddp_parameter_s=max(0.0, ddp[1] - alone[1]) / large,
        fsdp_layer_s=max(0.0, fsdp[0] - alone[0]),
        fsdp_parameter_s=max(0.0, fsdp[1] - alone[1] - fsdp[0] + alone[0]) / (large - small),
    )


def _layers(width: int) -> nn.Sequential:
    return nn.Sequential(*(_Layer(width) for _ in range(LAYERS)))


def _sharded(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # takes 0.4 s, which probes of GPUs need not wait for

    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def _layer_s(model: nn.Module, steps: int) -> float:
    """Mean seconds of a layer's forward and backward pass."""
    taken: list[float] = []
    for _ in range(1 + steps):
        dist.barrier()
        began = time.perf_counter()
        model(torch.ones(1)).backward()
        taken.append(time.perf_counter() - began)
        model.zero_grad()
    return fmean(taken[1:]) / LAYERS
