"""A rank of `bench.plan_cpu`: trains small decoders with DDP and FSDP2, and times their steps."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.plan.layout import Sharding

WARM_UP, STEPS = 1, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training that is predicted and measured, with as many sequences on each rank."""

    name: str
    config: Mapping[str, Any]
    sharding: Sharding
    length: int
    sequences: int


def _config(hidden: int, layers: int, heads: int, intermediate: int, vocabulary: int) -> Mapping[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }


NARROW, WIDE = _config(256, 6, 4, 704, 4096), _config(512, 3, 8, 1408, 2048)
CASES = (
    Case(name="DDP, narrow", config=NARROW, sharding=Sharding.DDP, length=256, sequences=4),
    Case(name="DDP, wide", config=WIDE, sharding=Sharding.DDP, length=128, sequences=4),
    Case(name="FSDP2, narrow", config=NARROW, sharding=Sharding.FSDP, length=256, sequences=4),
)


class Block(nn.Module):
    """A layer with RMSNorm, rotary embeddings, causal attention and SwiGLU."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, wide, self.head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        self.first, self.second = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.first(tokens)
        q, k, v = (each(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        tokens = tokens + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.second(tokens)
        return tokens + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rotated(heads: Tensor) -> Tensor:
    """Rotary position embedding of queries or keys."""
    length, width = heads.shape[-2:]
    angles = torch.outer(torch.arange(length), 10_000.0 ** -(torch.arange(0, width, 2) / width)).repeat(1, 2)
    left, right = heads.chunk(2, dim=-1)
    return heads * angles.cos() + torch.cat((-right, left), dim=-1) * angles.sin()


class Decoder(nn.Module):
    """A Llama of the config's size."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.embedding(tokens)
        for layer in self.layers:
            states = layer(states)
        return self.head(self.norm(states))


def main() -> None:
    """Run all cases, and print the median seconds of a step of each, on the slowest rank."""
    dist.init_process_group("gloo")
    times = {case.name: _step_s(case) for case in CASES if case.sharding is Sharding.DDP or dist.get_world_size() > 1}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(times) + "\n")
    dist.destroy_process_group()


def _step_s(case: Case) -> float:
    torch.manual_seed(0)
    model: nn.Module = Decoder(case.config)
    if case.sharding is Sharding.FSDP:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(case.config["vocab_size"], (case.sequences, case.length))
    taken: list[float] = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        began = time.perf_counter()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - began)
    slowest = torch.tensor(median(taken[WARM_UP:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    main()
