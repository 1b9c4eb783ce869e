"""Compares predicted memory per GPU with published figures, and with what PyTorch's tensors take here.

.venv/bin/python -m bench.plan_memory [--json FILE]

Published figures (bench/published/memory.jsonl) are what PyTorch's allocator reserved at most. Here each case trains a
small decoder for two micro-batches in one process, on the CPU, with a process group that sends nothing, and counts the
bytes of all tensors that exist at a time. So the streams and the allocator of a GPU are not in it.
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import CheckpointPolicy

from bench.paired_stats import table
from bench.result_file import absolute, save
from bench.traffic_ranks import Feed
from holdfast.plan.layout import Layout, Recompute, Sharding
from holdfast.plan.memory import COMPILED_LOSS, EAGER_LOSS, ProgramMemory, memory
from holdfast.plan.model_catalog import MODELS
from holdfast.plan.transformer import Transformer, from_config

PUBLISHED = Path(__file__).parent / "published" / "memory.jsonl"
GOAL = 5.0
HIDDEN, HEADS, KV_HEADS, WIDE, LAYERS, VOCABULARY = 256, 8, 4, 896, 6, 4096
LENGTH, SEQUENCES, MICRO_BATCHES = 256, 2, 2
MATMUL = torch.ops.aten.mm.default
KEPT_OPERATIONS = (MATMUL, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)

_checkpointing: Any = checkpointing  # its functions are typed in part

EAGER = ProgramMemory(repeated=0.5, eager=True, fused_norms=False, loss=EAGER_LOSS, torch_parallelism=True)
COMPILED = ProgramMemory(repeated=0.5, loss=EAGER_LOSS, torch_parallelism=True)
"""With compiled layers; the loss is not."""
PROGRAMS = {
    "eager": EAGER,
    "compiled": COMPILED,
    "compiled, with the loss": replace(COMPILED, loss=COMPILED_LOSS),
}


class Case(Struct, frozen=True, kw_only=True):
    """A training that is measured here."""

    layout: Layout
    program: ProgramMemory

    @property
    def name(self) -> str:
        kernels = "eager" if self.program.eager else "compiled"
        sharding = self.layout.sharding.upper() if self.layout.dp > 1 else ""
        bits = 8 * self.program.element_bytes
        return f"{sharding} {self.layout}, {kernels}, {bits} bits, recompute {self.layout.recompute}".strip()


def cases() -> Iterator[Case]:
    """DDP in fp32, and FSDP2 in bf16, also with tensor parallelism."""
    for dp in (1, 2):
        layout = Layout(dp=dp, micro_batch=SEQUENCES, sharding=Sharding.DDP)
        yield Case(layout=layout, program=replace(EAGER, element_bytes=4))
    for program in (EAGER, COMPILED):
        for recompute in Recompute:
            for dp in (2, 8):
                layout = Layout(dp=dp, micro_batch=SEQUENCES, sharding=Sharding.FSDP, recompute=recompute)
                yield Case(layout=layout, program=program)
    for tp in (2, 4):
        for recompute in (Recompute.NONE, Recompute.FULL):
            layout = Layout(dp=2, tp=tp, micro_batch=SEQUENCES, sharding=Sharding.FSDP, recompute=recompute)
            yield Case(layout=layout, program=EAGER)


def decoder() -> Transformer:
    """The model as the planner sees it."""
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS, "intermediate_size": WIDE,
        "vocab_size": VOCABULARY, "tie_word_embeddings": False,
    }  # fmt: skip
    found = from_config(config, "decoder")
    assert found is not None
    return found


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        size = HIDDEN // HEADS
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * size, bias=False) for _ in range(2))

    def forward(self, tokens: Tensor, turns: Tensor) -> Tensor:
        split = [each(tokens).unflatten(-1, (-1, HIDDEN // HEADS)) for each in (self.q, self.k, self.v)]
        q, k, v = (each.transpose(1, 2) for each in (_turned(split[0], turns), _turned(split[1], turns), split[2]))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


def _turned(heads: Tensor, turns: Tensor) -> Tensor:
    """Rotary position embedding of queries or keys."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(heads)


class Layer(nn.Module):
    """A layer that recomputes itself in the backward pass as asked."""

    def __init__(self, recompute: Recompute) -> None:
        super().__init__()
        self.recompute = recompute
        self.first, self.attention = nn.RMSNorm(HIDDEN), Attention()
        self.second, self.network = nn.RMSNorm(HIDDEN), Feed(HIDDEN, WIDE)

    def forward(self, tokens: Tensor, turns: Tensor) -> Tensor:
        match self.recompute:
            case Recompute.NONE:
                return self._run(tokens, turns)
            case Recompute.FULL:
                return _checkpointing.checkpoint(self._run, tokens, turns, use_reentrant=False)
            case Recompute.SELECTIVE:
                return _checkpointing.checkpoint(
                    self._run, tokens, turns, use_reentrant=False, context_fn=_keep_every_other
                )

    def _run(self, tokens: Tensor, turns: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.first(tokens), turns)
        return tokens + self.network(self.second(tokens))


def _keep_every_other() -> Any:
    """Keep attention and every other product, as TorchTitan's policy does."""
    counts = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        counts[context.is_recompute] += operation is MATMUL
        again = operation is MATMUL and counts[context.is_recompute] % 2 == 0
        kept = operation in KEPT_OPERATIONS and not again
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return _checkpointing.create_selective_checkpoint_contexts(policy)


class Decoder(nn.Module):
    """A small Llama."""

    def __init__(self, recompute: Recompute) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(recompute) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, turns: Tensor) -> Tensor:
        states = self.embedding(tokens)
        for layer in self.layers:
            states = layer(states, turns)
        return self.head(self.norm(states))


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made while it is active, and keeps the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch.compile may run although this is active: it does not change what is computed."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # count the operations on its local tensors
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, Tensor) and not isinstance(each, DTensor):
                self._count(each.untyped_storage())
        return result

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count also what storages grow and shrink to: FSDP frees gathered weights so."""
        storages: Any = torch.UntypedStorage
        resize = storages.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result: Any = resize(storage, size)
            self._count(storage)
            return result

        storages.resize_ = resized
        try:
            with self:
                yield
        finally:
            storages.resize_ = resize

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.most = max(self.most, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def measured(case: Case) -> int:
    """Most bytes of tensors during a step of a rank after its first."""
    layout = case.layout
    if layout.sharding is Sharding.DDP:  # one rank is like the others, and DDP needs a real group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = None
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.gpus)
        mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small, and the machine may have other work
    torch.manual_seed(0)
    torch._dynamo.reset()
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH))
    angles = torch.outer(torch.arange(LENGTH).float(), torch.rand(HIDDEN // HEADS // 2))
    turns = torch.polar(torch.ones_like(angles), angles)
    peak = PeakBytes()
    try:
        with peak.counting(), ExitStack() as stack:
            model = _divided(case, mesh)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            if layout.tp > 1:
                stack.enter_context(loss_parallel())
            for _ in range(2):
                peak.most = peak.now
                for _ in range(MICRO_BATCHES):
                    _step(model, tokens, turns)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()
    return peak.most


def _step(model: nn.Module, tokens: Tensor, turns: Tensor) -> None:
    logits = model(tokens, turns)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    del logits
    loss.backward()


def _divided(case: Case, mesh: DeviceMesh | None) -> nn.Module:
    """The model as its layout divides it."""
    layout = case.layout
    model = Decoder(layout.recompute)
    layers = model.layers
    if mesh is not None and layout.tp > 1:
        _divide_tensors(model, mesh["tp"])
    if not case.program.eager:
        for layer in layers:
            layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    if mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for index, layer in enumerate(layers):
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=index < LAYERS - 1)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    elif layout.dp > 1:
        return DistributedDataParallel(model, init_sync=False)
    return model


def _divide_tensors(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism, as in PyTorch's tutorial and TorchTitan."""
    columns, rows = ColwiseParallel, RowwiseParallel(output_layouts=Shard(1))
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    gather_first = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    for layer in model.layers:
        plan: dict[str, ParallelStyle] = {
            "first": SequenceParallel(), "second": SequenceParallel(), "attention": gather_first, "network": gather,
            "attention.q": columns(), "attention.k": columns(), "attention.v": columns(), "attention.o": rows,
            "network.gate": columns(), "network.up": columns(), "network.down": rows,
        }  # fmt: skip
        parallelize_module(layer, mesh, plan)


def predicted(case: Case) -> float:
    """The same bytes by the planner."""
    needed = memory(decoder(), case.layout, case.program, length=LENGTH, micro_batches=MICRO_BATCHES)
    return needed.tensors


def published() -> Iterator[tuple[str, float, float]]:
    """Name, predicted and published GiB of each run."""
    for line in PUBLISHED.read_text().splitlines():
        row = json.loads(line)
        layout = Layout(
            dp=row["dp"], tp=row["tp"], cp=row["cp"], micro_batch=row["mbs"], sharding=Sharding.FSDP,
            recompute=Recompute(row["recompute"]),
        )  # fmt: skip
        needed = memory(MODELS[row["model"]], layout, PROGRAMS[row["program"]], length=row["length"], micro_batches=1)
        yield (
            f"{row['model']}, {layout}, {row['precision']}, {row['program']}",
            needed.allocator / 2**30,
            row["memory_gib"],
        )


def main() -> None:
    """Compare, print, and write the results."""
    parser = argparse.ArgumentParser(prog="bench.plan_memory", description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    known = [*published()]
    here = [(case.name, predicted(case) / 2**20, measured(case) / 2**20) for case in cases()]
    _show("published, GiB per GPU", known)
    _show("measured here, MiB of tensors", here)
    save(
        args.json,
        "Accuracy of holdfast plan: memory",
        [
            replace(
                absolute("predicted memory per GPU: largest error", _largest(known), "%", goal=GOAL),
                conditions=f"{len(known)} figures that TorchTitan and its users published",
            ),
            replace(
                absolute("predicted memory of a rank's tensors: largest error", _largest(here), "%", goal=GOAL),
                conditions=f"{len(here)} trainings of a small decoder on a CPU",
            ),
        ],
    )


def _show(title: str, rows: Sequence[tuple[str, float, float]]) -> None:
    shown = [(name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs - 1:+.1%}") for name, ours, theirs in rows]
    print(table((title, "predicted", "actual", "error"), shown), "\n")


def _largest(rows: Sequence[tuple[str, float, float]]) -> float:
    return 100 * max(abs(ours / theirs - 1) for _, ours, theirs in rows)


if __name__ == "__main__":
    main()
