"""Trains a tiny transformer on one device, whose weights at the end are bit-exact on all devices of a type.

Forward pass, backward pass and AdamW use the kinds of operations of real training: products, softmax, normalization,
GELU, reductions. All inputs are integers divided by powers of two, computed without a generator. Devices of one type,
with one version of torch, round alike; others need not: an answer names what it depends on.
"""

from __future__ import annotations

import platform

import torch
from torch import nn

from holdfast.events.probe_results import MiniModelAnswer
from holdfast.train.ft.state_digest import TensorDigest

STEPS, ROUNDS = 4, 3
"""A wrong unit may be wrong rarely: the training is repeated, and its answers are compared."""
WIDTHS = {"cuda": 512, "cpu": 64}
TOKENS, BATCH, LAYERS, HEADS = 64, 4, 2, 4
_INPUT_BITS = 6


class _Block(nn.Module):
    """Attention and a feed-forward network, of plain operations: fused kernels differ between versions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.queries(self.norm(x)).chunk(3, dim=-1)
        )
        weights = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)
        x = x + self.mixed((weights @ value).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mixed_norm(x))))


def answer(device: torch.device) -> MiniModelAnswer:
    """Train a few times, and digest the weights; uses one thread of a CPU, since the number of threads rounds too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        digests = [_trained(device) for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    unlike = sum(digest != digests[0] for digest in digests)
    return MiniModelAnswer(arithmetic=_arithmetic(device), digest=f"{digests[0] % 2**64:016x}", contradictions=unlike)


@torch.enable_grad()
def _trained(device: torch.device) -> int:
    width = WIDTHS[device.type]
    with device:
        model = nn.Sequential(*(_Block(width) for _ in range(LAYERS)), nn.Linear(width, width))
    with torch.no_grad():
        for number, each in enumerate(model.parameters()):
            scale = 2.0 ** (_INPUT_BITS // 2) if each.ndim > 1 else 1.0
            each.copy_(_numbers(each.numel(), number, device).view_as(each) / scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-10, foreach=False)
    for step in range(STEPS):
        x = _numbers(BATCH * TOKENS * width, 1000 + step, device).view(BATCH, TOKENS, width)
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    return TensorDigest().compute(model.parameters())


def _numbers(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Multiples of 2^-6 between -0.5 and 0.5: the high bits of a sequence of integers that is exact everywhere."""
    places = torch.arange(count, dtype=torch.int64, device=device)
    mixed = (places * 6364136223 + seed * 1442695041 + 12345) % (1 << 31)
    mixed = (mixed * 1103515245 + 12345) % (1 << 31)
    return ((mixed >> (31 - _INPUT_BITS)) - (1 << (_INPUT_BITS - 1))).to(torch.float32) / (1 << _INPUT_BITS)


def _arithmetic(device: torch.device) -> str:
    """What the last bits depend on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
