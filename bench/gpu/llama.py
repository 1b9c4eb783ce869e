"""A Llama-3-shaped model that fills the GPU, trained by plain torch and by holdfast in turns, in one process.

Layers as wide as Llama 3 8B's, as many as fit: fp32 weights under bf16 autocast, AdamW, sequences of 8,192 tokens, no
recomputation, no compiler. Blocks of bare steps (A), of steps in a Session (B) and bare ones again (A') alternate; both
read the loss once a step. MFU counts attention in full and, as a detail, causally (src/holdfast/metrics/flops.py); the
peak is that of dense bf16 products (src/holdfast/metrics/devices.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional

from bench.gpu.device import Device, open_device
from bench.gpu.promises import LLAMA_MFU, LLAMA_STEP
from bench.gpu.section import NotLookedAt, Place, measured
from bench.gpu.training import GB
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, interleave, say
from bench.result_file import Figure, Peer, Result, from_rounds
from holdfast.metrics.devices import find_device
from holdfast.metrics.flops import ModelShape
from holdfast.train import RankConfig, Session

GOAL = 1.005
ROUNDS, STEPS, WARM_STEPS = 6, 4, 3
TINY_ROUNDS, TINY_STEPS = 1, 2
LENGTH, TINY_LENGTH = 8192, 16
SHAPE = ModelShape(layers=1, hidden=4096, heads=32, kv_heads=8, head_dim=128, vocabulary=128_256, intermediate=14_336)
TINY_SHAPE = ModelShape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, vocabulary=64, intermediate=64)
WEIGHT_BYTES = 16 + 2
"""For each weight: itself, its gradient and AdamW's state in fp32, and autocast's copy."""
ACTIVATION_BYTES = 26
"""For each token of a layer, over the hidden size plus half the intermediate size: what the backward pass needs."""
LOGIT_BYTES = 16
"""For each token and word: logits and their gradients, in bf16 and fp32."""
FILLED = 0.9
"""Share of the free memory that the estimate may use; fragments need the rest."""
TRIES = 3
"""Numbers of layers to try, each one less than before, if memory does not hold the estimate."""
THETA = 500_000.0


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self._shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.query = nn.Linear(shape.hidden, queries, bias=False)
        self.key = nn.Linear(shape.hidden, keys, bias=False)
        self.value = nn.Linear(shape.hidden, keys, bias=False)
        self.output = nn.Linear(queries, shape.hidden, bias=False)

    def forward(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = tokens.shape
        query, key, value = (
            each(tokens).view(batch, length, -1, self._shape.head_dim).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(
            _rotated(query, cos, sin), _rotated(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        return self.output(attended.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.before_attention, self.before_network = (nn.RMSNorm(shape.hidden) for _ in range(2))
        self.attention = Attention(shape)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tokens = tokens + self.attention(self.before_attention(tokens), cos, sin)
        given = self.before_network(tokens)
        return tokens + self.down(functional.silu(self.gate(given)) * self.up(given))


class Llama(nn.Module):
    """A decoder with an untied head; its output is the loss of the next token."""

    def __init__(self, shape: ModelShape, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        rates = THETA ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden, self.cos, self.sin)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), tokens[:, 1:].flatten())


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


class Loop:
    """The model, its optimizer and one batch of random tokens."""

    def __init__(self, device: Device, shape: ModelShape, length: int) -> None:
        self._device = device
        with device.torch:
            self.model = Llama(shape, length)
            self._tokens = torch.randint(shape.vocabulary, (1, length + 1))
        fused = True if device.torch.type == "cuda" else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=fused)

    def step(self) -> torch.Tensor:
        """One optimizer step; returns its loss, which is still on the device."""
        self.optimizer.zero_grad()
        with torch.autocast(self._device.torch.type, torch.bfloat16):
            loss = self.model(self._tokens)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def layers_that_fit(shape: ModelShape, length: int, free_bytes: float) -> int:
    """How many layers fill this much memory, with a batch of one sequence."""
    ends = shape.hidden * shape.vocabulary
    in_layer = (shape.active_weights - ends) / shape.layers
    for_ends = 2 * ends * WEIGHT_BYTES + length * shape.vocabulary * LOGIT_BYTES
    for_layer = in_layer * WEIGHT_BYTES + length * (shape.hidden + shape.intermediate / 2) * ACTIVATION_BYTES
    return max(1, int((FILLED * free_bytes - for_ends) / for_layer))


def measure(place: Place) -> Iterator[Result]:
    """Steps with and without holdfast, and the MFU."""
    device = open_device(place.device)
    length, steps = (TINY_LENGTH, TINY_STEPS) if place.tiny else (LENGTH, STEPS)
    loop, shape = _filled(place, device, length)
    session = Session(model=loop.model, optimizer=loop.optimizer, config=RankConfig())

    def block(end: Callable[[torch.Tensor], object]) -> float:
        device.synchronize()
        begin = device.mark()
        for _ in range(steps):
            end(loop.step())
        return device.elapsed_ms(begin, device.mark()) / steps

    def bare() -> float:
        return block(torch.Tensor.item)

    def ours() -> float:
        return block(lambda loss: (loss.item(), session.commit(loss=loss, tokens=length)))

    sides = {PEER: bare, OURS: ours, PEER_AGAIN: bare}
    rounds = interleave(sides, TINY_ROUNDS if place.tiny else ROUNDS, unit="ms a step")
    weights = sum(each.numel() for each in loop.model.parameters())
    conditions = (
        f"{shape.layers} layers, {weights / 1e9:.2f} billion weights, {length:,} tokens, "
        f"{len(rounds)} rounds of {steps} steps"
    )
    result = from_rounds(LLAMA_STEP, rounds, goal=GOAL, unit="ms", peer="plain torch")
    yield msgspec.structs.replace(result, conditions=conditions)
    yield _mfu(place, device, shape, length, rounds, conditions)


def _filled(place: Place, device: Device, length: int) -> tuple[Loop, ModelShape]:
    """A loop that has taken its first steps, with as many layers as the memory holds."""
    if place.tiny:
        return Loop(device, TINY_SHAPE, length), TINY_SHAPE
    most = layers_that_fit(SHAPE, length, device.free_bytes())
    for layers in range(most, max(0, most - TRIES), -1):
        shape = replace(SHAPE, layers=layers)
        try:
            return _warmed(Loop(device, shape, length)), shape
        except torch.OutOfMemoryError:
            say(f"{layers} layers do not fit")
        device.release()  # after the exception, whose frames hold the tensors
    raise NotLookedAt(f"no {max(1, most - TRIES + 1)} layers fit into the memory that is free")


def _warmed(loop: Loop) -> Loop:
    for _ in range(WARM_STEPS):
        loop.step().item()
    return loop


def _mfu(
    place: Place, device: Device, shape: ModelShape, length: int, rounds: Sequence[Round], conditions: str
) -> Result:
    """Throughput and MFU with holdfast; without a known peak only TFLOP/s."""
    step_s = median(each[OURS] for each in rounds) / 1e3
    bare_s = median((each[PEER] + each[PEER_AGAIN]) / 2 for each in rounds) / 1e3
    flops = shape.per_token(length)
    assert flops is not None
    assert flops.causal is not None
    known = find_device(place.device.name)
    peak = known.peak_tflops if known else None

    def shown(per_token: float, step_s: float) -> Figure:
        tflops = per_token * length / step_s / 1e12
        return Figure(value=100 * tflops / peak if peak else tflops, unit="%" if peak else "TFLOP/s", decimals=1)

    memory_bytes = torch.cuda.max_memory_allocated() if device.torch.type == "cuda" else 0
    return measured(
        LLAMA_MFU,
        shown(flops.full, step_s),
        peer=Peer(name="plain torch", figure=shown(flops.full, bare_s)),
        conditions=conditions,
        details={
            "causal": str(shown(flops.causal, step_s)),
            "throughput": f"{length / step_s:,.0f} tokens/s",
            "plain torch": f"{length / bare_s:,.0f} tokens/s",
            "memory": f"{memory_bytes / GB:.1f} of {place.device.memory_bytes / GB:.1f} GB",
            "peak": f"{peak:g} TFLOP/s ({known.source})" if known and peak else "unknown",
        },
    )
