"""Small loops that several sections train, and digests of their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from bench.gpu.device import Device

GB = 10**9
BYTES_PER_WEIGHT = 12
"""fp32 weights, and two tensors of AdamW's state for each."""


class StateLoop:
    """A loop whose state has a given size: independent linear layers, trained by AdamW.

    Every layer multiplies the same batch, so that the numbers stay finite however many there are.
    """

    def __init__(self, device: Device, state_bytes: int, *, width: int, batch: int) -> None:
        self._device = device
        count = max(1, round(state_bytes / BYTES_PER_WEIGHT / width**2))
        with device.torch:
            self.model = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(count))
            self._batch = torch.randn(batch, width)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=True if device.torch.type == "cuda" else None
        )
        self.micro_batches = 1

    def step(self, before_optimizer: Callable[[], object] = int) -> None:
        """One optimizer step; the host waits for its loss, as most loops do."""
        loss = self._gradients()
        before_optimizer()
        self.optimizer.step()
        loss.item()

    def _gradients(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self._device.torch)
        for _ in range(self.micro_batches):
            for layer in self.model:
                part = layer(self._batch).square().mean()
                part.backward()
                loss += part.detach()
        return loss

    def lengthen(self, step_s: float) -> None:
        """Accumulate gradients over as many micro-batches as a step of this length has."""
        for _ in range(2):
            self.step()
        begin = self._device.mark()
        self.step()
        took_ms = self._device.elapsed_ms(begin, self._device.mark())
        self.micro_batches = max(1, round(1e3 * step_s / took_ms))


def step_times_ms(device: Device, marks: list[Any]) -> list[float]:
    """Milliseconds between consecutive marks."""
    return [device.elapsed_ms(begin, end) for begin, end in pairwise(marks)]


def tensors_of(tree: object) -> Iterator[torch.Tensor]:
    """All tensors of nested state, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value)


def digest(tensors: Iterable[torch.Tensor]) -> list[int]:
    """For each tensor a number that any changed bit changes, computed where the tensor is."""
    return [_digest(tensor.detach()) for tensor in tensors]


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> int:
    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
    if bits.numel() % 4 == 0:
        bits = bits.view(torch.int32)
    # An odd factor for each place, so that swapped numbers differ; sums wrap around alike on every device.
    factors = torch.arange(bits.numel(), dtype=torch.int64, device=bits.device).mul_(2).add_(1)
    return int((factors * bits).sum().item())
