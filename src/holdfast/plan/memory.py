"""Memory of the fullest GPU of a layout: weights, gradients, optimizer states, activations."""

from __future__ import annotations

from msgspec import Struct

from holdfast.plan.layout import Layout, Recompute, Sharding
from holdfast.plan.transformer import Transformer

GRADIENT_BYTES = 4
"""Gradients, accumulated in fp32."""
OPTIMIZER_BYTES = 12
"""Master weights and both moments of Adam, in fp32."""
LOGIT_BYTES = 12
"""Logits in bf16 and fp32, and the gradients of both."""
RESERVED_BYTES = 3 << 30
"""CUDA context and NCCL buffers."""
FRAGMENTS = 0.05
"""Share of activations that the allocator's fragmentation adds."""


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes on the fullest GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    reserved: float = RESERVED_BYTES

    @property
    def total(self) -> float:
        """All of it, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.reserved


def stage_parameters(model: Transformer, layout: Layout) -> tuple[float, float]:
    """Parameters per GPU of the fullest pipeline stage before sharding: dense ones, and those of experts."""
    layers = -(-model.shape.layers // layout.pp)
    experts = model.expert_parameters / layout.pp / layout.ep
    ends = model.embedding_weights * (1 if layout.pp > 1 or model.tied else 2)
    mixtures = model.mixture_layers / model.shape.layers
    each = model.attention_weights + (1 - mixtures) * model.dense_weights + mixtures * model.shared_weights
    # Experts are not divided by tp: its ranks hold different experts or shards of them (Megatron's default).
    return (layers * each + ends) / layout.tp + layers * model.norm_weights, experts


def layer_activations(model: Transformer, recompute: Recompute, *, repeated: float = 0.0) -> float:
    """Elements kept per token of one layer without tensor parallelism (arXiv 2205.05198, section 4).

    `repeated` is the share of the products that selective recomputation repeats. Attention scores are not included, as
    fused kernels do not keep them.
    """
    shape = model.shape
    hidden = shape.hidden
    if recompute is Recompute.FULL:
        return hidden
    mixtures = model.mixture_layers / shape.layers
    routed = shape.active_experts * shape.expert_intermediate + shape.shared_intermediate
    widths = mixtures * routed + (1 - mixtures) * shape.intermediate
    copies = mixtures * shape.active_experts * hidden  # each expert has its own copy of the token
    attention = model.query_width + model.kv_width + model.value_width
    latent = model.latent
    compressed = (latent.query_rank or 0) + latent.kv_rank + latent.rope_dim if latent else 0
    products = attention - model.value_width + compressed + hidden + (shape.projections - 1) * widths
    inputs = hidden + model.value_width + copies
    if recompute is Recompute.SELECTIVE:
        return inputs + (1 - repeated) * products
    masks = hidden if model.biases else 0  # two masks of dropout, one byte each
    return inputs + products + 2 * hidden + widths + masks


def in_flight(layout: Layout, micro_batches: int) -> float:
    """Micro-batches whose activations the first stage keeps at once, in units of the whole stage."""
    if layout.pp == 1:
        return 1.0
    deep = layout.pp if layout.interleave == 1 else layout.pp + (layout.pp - 1) / layout.interleave
    return min(float(micro_batches), deep)


def memory(
    model: Transformer,
    layout: Layout,
    *,
    length: int,
    micro_batches: int,
    domain: int = 8,
    repeated: float = 0.0,
    element_bytes: int = 2,
) -> Memory:
    """Memory of the fullest GPU.

    `length` is the tokens of a sequence, `domain` the GPUs that HSDP shards over, `repeated` the share of the products
    that selective recomputation repeats, `element_bytes` those of activations and of weights that products read.
    """
    # In fp32 the weights that products read are the optimizer's.
    optimizer_bytes = OPTIMIZER_BYTES - (element_bytes if element_bytes == GRADIENT_BYTES else 0)
    dense, experts = stage_parameters(model, layout)
    ranks = layout.dp * layout.cp
    shards = min(ranks, domain) if layout.sharding is Sharding.HSDP else ranks
    expert_shards = max(1.0, shards * layout.tp / layout.ep)
    total = dense + experts
    sharded = dense / shards + experts / expert_shards
    layers = -(-model.shape.layers // layout.pp)
    tokens = layout.micro_batch * length / layout.cp
    kept = layer_activations(model, layout.recompute, repeated=repeated) * element_bytes / layout.tp
    if layout.recompute is Recompute.FULL:
        again = layer_activations(model, Recompute.NONE) * element_bytes / layout.tp  # one layer at a time
    else:
        again = 0.0
    # Inputs of a layer's products, gathered from the ranks that divide it: two in the backward pass.
    whole = 2 * model.shape.hidden * element_bytes if layout.tp > 1 else 0.0
    fully = layout.sharding in (Sharding.FSDP, Sharding.HSDP)
    gathered = 2 * element_bytes * total / layers if fully else 0.0
    return Memory(
        weights=element_bytes * (sharded if fully else total) + gathered,
        gradients=GRADIENT_BYTES * (sharded if fully else total),
        optimizer=optimizer_bytes * (total if layout.sharding is Sharding.DDP else sharded),
        activations=(1 + FRAGMENTS) * tokens * (kept * layers * in_flight(layout, micro_batches) + again + whole),
        logits=(1 + FRAGMENTS) * tokens * model.shape.vocabulary / layout.tp * LOGIT_BYTES if layout.pp == 1 else 0.0,
    )
