"""A digest of this rank's weights and optimizer state, computed where they are.

The bytes of all local shards are summed as 64-bit words, and the sums are mixed into one number. Each step is
invertible for one changed sum, so that any single changed bit changes the digest. The device reads each byte once
and returns one number; nothing is copied to the host. Buffers do not count: replicas do not average them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

BLOCKS, LANES = 64, 16
"""Sums per device: one per block of a tensor and lane in it, so that places matter. A CPU reads this shape as fast as a
plain sum. 1021 interleaved columns, which would tell all memory pages apart, took five times as long.
"""
SUMS = BLOCKS * LANES
SMALL_BYTES = 1 << 14
"""Tensors up to this size are joined before they are summed: a kernel per tensor costs more than a copy."""
_WORD_BYTES = 8
_MIX = 0x9E3779B97F4A7C15
"""An odd number with irregular bits: 2^64 divided by the golden ratio."""


class Digest(NamedTuple):
    """Two signed 64-bit integers."""

    weights: int
    optimizer: int
    """Of the optimizer's state; 0 if it was not read."""


class TensorDigest:
    """Computes digests of tensors."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def compute(self, tensors: Iterable[torch.Tensor]) -> int:
        """The digest of these tensors, in this order; waits for the device."""
        sums: dict[torch.device, torch.Tensor] = {}
        small: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            content = _bytes_of(tensor)
            whole = content.numel() // _WORD_BYTES * _WORD_BYTES if content.numel() > SMALL_BYTES else 0
            if whole:
                self._add(sums, content[:whole])
            small.setdefault(content.device, []).append(content[whole:])
        for parts in small.values():
            joined = torch.cat(parts)
            self._add(sums, nn.functional.pad(joined, (0, -joined.numel() % _WORD_BYTES)))
        digests = [int(_mixed(total * self._factors_on(device)).sum().item()) for device, total in sums.items()]
        return _signed(sum(each * _MIX**at for at, each in enumerate(digests)))

    def _add(self, sums: dict[torch.device, torch.Tensor], content: torch.Tensor) -> None:
        """Add bytes that fill whole words to the sums of their device."""
        if content.storage_offset() % _WORD_BYTES:
            content = content.clone()
        words = content.view(torch.int64)
        whole = words.numel() // SUMS * SUMS
        blocks, rest = words[:whole].view(BLOCKS, whole // SUMS, LANES), words[whole:]
        total = sums.setdefault(words.device, words.new_zeros(SUMS))
        total.mul_(_signed(_MIX)).add_(blocks.sum(1).view(-1))
        total[: rest.numel()].add_(rest)

    def _factors_on(self, device: torch.device) -> torch.Tensor:
        """An odd number for each sum, so that it matters which sum a word is in."""
        if device not in self._factors:
            self._factors[device] = _mixed(torch.arange(1, SUMS + 1, device=device) * _signed(_MIX)) | 1
        return self._factors[device]


class StateDigest:
    """Computes the digest of one training loop's weights and optimizer state."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        # The same tensors at each call: FSDP2 replaces the parameters of the modules while it computes.
        self._parameters = [*model.parameters()]
        self._optimizer = optimizer
        self._digest = TensorDigest()

    def compute(self, *, weights_only: bool = False) -> Digest:
        """The digest of the current state; waits for the device."""
        weights = self._digest.compute(self._parameters)
        return Digest(weights, 0 if weights_only else self._digest.compute(self._optimizer_tensors()))

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """The optimizer's state, in an order that is the same on all replicas."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state: dict[str, Any] = self._optimizer.state.get(parameter, {})
                yield from (state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of this rank's part of a tensor; copies only tensors that are not contiguous."""
    if hasattr(tensor, "__tensor_flatten__"):  # DTensor and quantized tensors, which may hold one another
        names = cast("list[str]", cast("Any", tensor).__tensor_flatten__()[0])
        inside = [getattr(tensor, name) for name in names]  # of DTensor also its mesh
        parts = [_bytes_of(each) for each in inside if isinstance(each, torch.Tensor)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return tensor.detach().reshape(-1).view(torch.uint8)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Words of which each bit depends on all bits of the given one: SplitMix64's finaliser, which is invertible."""
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        words = (words ^ ((words >> bits) & (2 ** (64 - bits) - 1))) * _signed(factor)
    return words


def _signed(number: int) -> int:
    """The number modulo 2^64, as torch's int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63
