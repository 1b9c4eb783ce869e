"""A rank of `bench.traffic`: trains a small decoder in one layout, and reads the kernel's counters of its node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from holdfast.host.tcp_sockets import tcp_sockets
from holdfast.plan.layout import Layout, Sharding

CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "intermediate_size": 704,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}
"""What both the program and the planner are given."""
LENGTH = 128


class Block(nn.Module):
    """A layer with attention and a gated feed-forward network; the position of tokens plays no part."""

    def __init__(self) -> None:
        super().__init__()
        hidden, wide = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.attention = Attention(hidden)
        self.feed = Feed(hidden, wide)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norms[0](tokens))
        return tokens + self.feed(self.norms[1](tokens))


class Attention(nn.Module):
    """Causal attention of all heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (
            each(tokens).unflatten(-1, (-1, CONFIG["head_dim"])).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(tokens)) * self.up(tokens))


class Decoder(nn.Module):
    """The layers of one pipeline stage, with the embedding in the first one and the head in the last."""

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        hidden, vocabulary = CONFIG["hidden_size"], CONFIG["vocab_size"]
        last = stage == stages - 1
        self.embedding = nn.Embedding(vocabulary, hidden) if stage == 0 else nn.Identity()
        self.layers = nn.ModuleList(Block() for _ in range(CONFIG["num_hidden_layers"] // stages))
        self.norm = nn.RMSNorm(hidden) if last else nn.Identity()
        self.head = nn.Linear(hidden, vocabulary, bias=False) if last else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.embedding(tokens)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(self.norm(tokens))


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """The loss of a micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def step_of(layout: Layout, rank: int, *, batch: int, shards: int) -> Callable[[], object]:
    """Wraps the decoder for a layout, and returns what runs one step of `batch` sequences on this rank.

    `shards` are the ranks that HSDP shards over.
    """
    torch.manual_seed(0)
    shape = (layout.pp, layout.dp, layout.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    stage = rank * layout.pp // layout.gpus
    model: nn.Module = Decoder(stage, layout.pp)
    own = batch // layout.dp
    tokens = torch.randint(CONFIG["vocab_size"], (own, LENGTH))
    if layout.tp > 1:
        _divide(model.bfloat16(), mesh["tp"])
    if layout.pp > 1:
        model = model.bfloat16()
    if layout.dp > 1:
        model = _sharded(model, layout.sharding, mesh, shards)
    if layout.pp > 1:
        return _pipelined(model, layout, mesh, stage, tokens)
    return partial(_plain_step, model, tokens.split(layout.micro_batch), divided=layout.tp > 1)


def _plain_step(model: nn.Module, micro_batches: Sequence[Tensor], *, divided: bool) -> None:
    for tokens in micro_batches:
        with loss_parallel() if divided else nullcontext():
            cross_entropy(model(tokens), tokens).backward()


def _divide(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor parallelism without sequence parallelism, as in PyTorch's tutorial."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    whole = partial(PrepareModuleInput, input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    for layer in model.layers:
        columns = {
            name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "feed.gate", "feed.up")
        }
        rows = {name: RowwiseParallel() for name in ("attention.o", "feed.down")}
        parallelize_module(layer, mesh, {"attention": whole(), "feed": whole(), **columns, **rows})


def _sharded(model: nn.Module, sharding: Sharding, mesh: DeviceMesh, shards: int) -> nn.Module:
    ranks = mesh["dp"]
    if sharding is Sharding.DDP:
        return DistributedDataParallel(model, process_group=ranks.get_group())
    if sharding is Sharding.HSDP:
        ranks = init_device_mesh("cpu", (ranks.size() // shards, shards), mesh_dim_names=("replica", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
        fully_shard(layer, mesh=ranks, mp_policy=policy)
    return fully_shard(model, mesh=ranks, mp_policy=policy)


def _pipelined(model: nn.Module, layout: Layout, mesh: DeviceMesh, stage: int, tokens: Tensor) -> Callable[[], object]:
    group = mesh["pp"].get_group()
    built = pipelining.PipelineStage(model, stage, layout.pp, torch.device("cpu"), group=group)
    schedule = pipelining.Schedule1F1B(built, tokens.shape[0] // layout.micro_batch, loss_fn=cross_entropy)
    inputs = (tokens,) if stage == 0 else ()
    wanted = {"target": tokens, "losses": []} if stage == layout.pp - 1 else {}
    return partial(schedule.step, *inputs, **wanted)


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What the kernel counted in a rank's node."""

    acked: Mapping[str, int]
    """By the address of the peer: bytes of TCP's payload that it has received."""
    received: Mapping[str, int]
    connections: Mapping[str, int]
    wire_bytes: int
    """Bytes that left the interface, with headers."""
    wire_packets: int


def read_counters() -> Counters:
    """The counters of the node of this process."""
    acked, received, connections = Counter[str](), Counter[str](), Counter[str]()
    for each in tcp_sockets():
        if not each.listening:
            acked[each.remote.host] += each.counters.acked_bytes
            received[each.remote.host] += each.counters.received_bytes
            connections[each.remote.host] += 1
    sent_bytes, packets = next(_sent_by_interface("eth0"))
    return Counters(
        acked=acked, received=received, connections=connections, wire_bytes=sent_bytes, wire_packets=packets
    )


def _sent_by_interface(name: str) -> Iterator[tuple[int, int]]:
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        interface, _, counts = line.partition(":")
        if interface.strip() == name:
            numbers = counts.split()
            yield int(numbers[8]), int(numbers[9])
