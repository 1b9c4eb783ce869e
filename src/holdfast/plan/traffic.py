"""Bytes that a rank sends per step, by kind of parallelism, with ring collectives.

A ring over n ranks sends (n - 1) / n of the payload per rank in an all-gather or reduce-scatter, and twice that in an
all-reduce. Payloads of n ranks count whole: an all-gather's is its result.
"""

from __future__ import annotations

from holdfast.plan.layout import Layout, Sharding
from holdfast.plan.memory import stage_parameters
from holdfast.plan.transformer import Transformer


def gather_bytes(payload: float, ranks: int) -> float:
    """Bytes sent per rank in a ring all-gather or reduce-scatter."""
    return payload * (ranks - 1) / ranks


def reduce_bytes(payload: float, ranks: int) -> float:
    """Bytes sent per rank in a ring all-reduce."""
    return 2 * gather_bytes(payload, ranks)


def ddp_bytes(parameters: float, ranks: int, *, gradient_bytes: int) -> float:
    """DistributedDataParallel: one all-reduce of all gradients."""
    return reduce_bytes(parameters * gradient_bytes, ranks)


def fsdp_bytes(
    parameters: float, ranks: int, *, weight_bytes: int, gradient_bytes: int, kept: float = 0.0, passes: int = 1
) -> float:
    """Fully sharded: an all-gather in the forward pass, another in the backward pass, a reduce-scatter of gradients.

    `kept` parameters stay gathered after the forward pass, as FSDP2's root module does; `passes` is the micro-batches.
    """
    gathered = (2 * parameters - kept) * weight_bytes
    return passes * gather_bytes(gathered + parameters * gradient_bytes, ranks)


def hsdp_bytes(
    parameters: float,
    shards: int,
    replicas: int,
    *,
    weight_bytes: int,
    gradient_bytes: int,
    kept: float = 0.0,
) -> float:
    """Sharded within groups, replicated across them: also an all-reduce of each rank's shard of the gradients."""
    within = fsdp_bytes(parameters, shards, weight_bytes=weight_bytes, gradient_bytes=gradient_bytes, kept=kept)
    return within + reduce_bytes(parameters / shards * gradient_bytes, replicas)


def tensor_bytes(tokens: float, hidden: int, layers: float, ranks: int, *, element_bytes: int = 2) -> float:
    """Tensor parallelism: two all-reduces of the activations per layer forward and two backward.

    With sequence parallelism each is a reduce-scatter and an all-gather, which send as much.
    """
    return 4 * layers * reduce_bytes(tokens * hidden * element_bytes, ranks)


def pipeline_bytes(tokens: float, hidden: int, chunks: int, *, element_bytes: int = 2) -> float:
    """A middle stage of a pipeline: activations to the next stage and their gradients to the one before, per chunk."""
    return 2 * chunks * tokens * hidden * element_bytes


def step_traffic(
    model: Transformer, layout: Layout, *, batch: int, length: int, gradient_bytes: int, domain: int = 8
) -> dict[str, float]:
    """Bytes that a rank sends per step along `dp`, `tp` and `pp`, on a middle stage; zero where an axis has size 1."""
    dense, experts = stage_parameters(model, layout)
    parameters, ranks = dense + experts, layout.dp * layout.cp
    count = layout.micro_batches(batch)
    tokens = count * layout.micro_batch * length / layout.cp
    shards = min(ranks, domain)
    match layout.sharding:
        case Sharding.DDP:
            data = ddp_bytes(parameters, ranks, gradient_bytes=gradient_bytes)
        case Sharding.OPTIMIZER:
            data = gather_bytes(parameters * (gradient_bytes + 2), ranks)
        case Sharding.FSDP:
            data = fsdp_bytes(parameters, ranks, weight_bytes=2, gradient_bytes=gradient_bytes, passes=count)
        case Sharding.HSDP:
            data = hsdp_bytes(parameters, shards, ranks // shards, weight_bytes=2, gradient_bytes=gradient_bytes)
    shape = model.shape
    return {
        "dp": data,
        "tp": tensor_bytes(tokens, shape.hidden, shape.layers / layout.pp, layout.tp),
        "pp": pipeline_bytes(tokens / layout.tp, shape.hidden, layout.interleave) if layout.pp > 1 else 0.0,
    }
