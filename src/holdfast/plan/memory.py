"""Memory of the fullest GPU of a layout: weights, gradients, optimizer states, activations, and what lies idle."""

from __future__ import annotations

from msgspec import Struct

from holdfast.plan.layout import Layout, Recompute, Sharding
from holdfast.plan.transformer import Transformer

GRADIENT_BYTES = MASTER_BYTES = 4
"""Gradients, accumulated in fp32, and the weights that the optimizer changes."""
MOMENT_BYTES = 8
"""Both moments of Adam, in fp32."""
RESERVED_BYTES = 3 << 30
"""CUDA context and NCCL buffers."""
FRAGMENTS = 0.03
"""Share of activations that the allocator's rounding and fragments add."""
NORM_COPIES = {2: 3, 4: 1}
"""What an RMSNorm of separate operations keeps beyond a fused one, in elements of so many bytes per element.

PyTorch, aten/src/ATen/native/layer_norm.cpp, `rms_norm`: the input in fp32 instead of bf16, and the input divided.
"""


class LossMemory(Struct, frozen=True):
    """Bytes per logit when the loss needs most."""

    whole: float
    divided: float
    """Where tensor-parallel ranks divide the vocabulary."""


EAGER_LOSS = LossMemory(12, 16)
"""Log-softmax and the gradients before and after it in fp32; the logits are freed by then.

Divided, there are four (torch/distributed/tensor/parallel/loss.py).
"""
COMPILED_LOSS = LossMemory(4, 4)
"""Logits and their gradients in bf16."""
MEGATRON_LOSS = LossMemory(8, 8)
"""Logits and their gradients in bf16, and the softmax in fp32, which is changed in place.

Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py.
"""
STATISTICS_BYTES = 4
"""Log of the softmax's sum, per token and head."""


class ProgramMemory(Struct, frozen=True, kw_only=True):
    """What a training program keeps, by how it runs its kernels."""

    element_bytes: int = 2
    """Of activations, and of weights that products read."""
    repeated: float = 0.0
    """Share of the products that selective recomputation repeats."""
    eager: bool = False
    """Whether each operation keeps its own inputs: without a compiler and fused kernels of networks."""
    fused_norms: bool = True
    """Whether an RMSNorm is one kernel."""
    loss: LossMemory = MEGATRON_LOSS
    torch_parallelism: bool = False
    """Whether parallelism is PyTorch's own.

    Its DDP has gradients a second time, in the buckets that it reduces, and tensor parallelism keeps gathered inputs.
    """


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes on the fullest GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Those kept for the backward pass."""
    working: float
    """What is needed for a moment only: the loss's logits, or a layer that is computed again."""
    idle: float
    """Freed, but not reusable when the most is needed: too small a block, or of another stream."""
    reserved: float = RESERVED_BYTES

    @property
    def tensors(self) -> float:
        """Bytes of tensors."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working

    @property
    def allocator(self) -> float:
        """What PyTorch's allocator reserves at most (`torch.cuda.max_memory_reserved`)."""
        return self.tensors + FRAGMENTS * (self.activations + self.working) + self.idle

    @property
    def total(self) -> float:
        """All of it."""
        return self.allocator + self.reserved


def stage_parameters(model: Transformer, layout: Layout) -> tuple[float, float]:
    """Parameters per GPU of the fullest pipeline stage before sharding: dense ones, and those of experts."""
    layers = -(-model.shape.layers // layout.pp)
    experts = model.expert_parameters / layout.pp / layout.ep
    ends = model.embedding_weights * (1 if layout.pp > 1 or model.tied else 2)
    mixtures = model.mixture_layers / model.shape.layers
    each = model.attention_weights + (1 - mixtures) * model.dense_weights + mixtures * model.shared_weights
    # Experts are not divided by tp: its ranks hold different experts or shards of them (Megatron's default).
    return (layers * each + ends) / layout.tp + layers * model.norm_weights, experts


def layer_activations(model: Transformer, recompute: Recompute, program: ProgramMemory) -> float:
    """Elements kept per token of one layer without tensor parallelism (arXiv 2205.05198, section 4).

    Of attention only the softmax's statistics are kept, not the scores, as by fused kernels.
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
    statistics = shape.heads * STATISTICS_BYTES / program.element_bytes
    inputs = hidden + model.value_width + copies + statistics
    if recompute is Recompute.SELECTIVE:
        last = hidden if program.eager else 0  # no gradient needs it, but only a compiler knows
        return inputs + (1 - program.repeated) * products + last
    masks = hidden if model.biases else 0  # two masks of dropout, one byte each
    gated = shape.projections - 2
    separate = gated * widths if program.eager else 0  # activation functions' results, which a gate multiplies
    norms = 0 if program.fused_norms or model.biases else 2 * NORM_COPIES[program.element_bytes] * hidden
    return inputs + products + 2 * hidden + widths + masks + separate + norms


def in_flight(layout: Layout, micro_batches: int) -> float:
    """Micro-batches whose activations the first stage keeps at once, in units of the whole stage."""
    if layout.pp == 1:
        return 1.0
    deep = layout.pp if layout.interleave == 1 else layout.pp + (layout.pp - 1) / layout.interleave
    return min(float(micro_batches), deep)


def memory(
    model: Transformer, layout: Layout, program: ProgramMemory, *, length: int, micro_batches: int, domain: int = 8
) -> Memory:
    """Memory of the fullest GPU; `length` is the tokens of a sequence, `domain` the GPUs that HSDP shards over."""
    size, tp = program.element_bytes, layout.tp
    dense, experts = stage_parameters(model, layout)
    ranks = layout.dp * layout.cp
    shards = min(ranks, domain) if layout.sharding is Sharding.HSDP else ranks
    total = dense + experts
    sharded = dense / shards + experts / max(1.0, shards * tp / layout.ep)
    layers = -(-model.shape.layers // layout.pp)
    tokens = layout.micro_batch * length / layout.cp
    fully = layout.sharding in (Sharding.FSDP, Sharding.HSDP)

    ends = model.embedding_weights * (1 if model.tied else 2) / tp
    layer = max(0.0, total - (ends if layout.pp == 1 else 0)) / layers
    # FSDP2 keeps the weights outside of layers gathered, and programs leave the last layer so. In the backward pass a
    # layer is gathered while another is computed.
    gathered = size * (ends + layer) if fully else 0.0
    next_layer = size * layer if fully else 0.0
    optimizer = MOMENT_BYTES + (0 if fully or size == MASTER_BYTES else MASTER_BYTES)
    copies = 2 if program.torch_parallelism and layout.sharding is Sharding.DDP and ranks > 1 else 1

    hidden = size * tokens * model.shape.hidden
    kept = size * tokens * layer_activations(model, layout.recompute, program) / tp
    if program.torch_parallelism and layout.recompute is Recompute.NONE:
        kept += 2 * hidden * (1 - 1 / tp)
    everything = size * tokens * layer_activations(model, Recompute.NONE, program) / tp
    # Inputs of a layer's products, gathered from the ranks that divide it, and their results, to be added up: of both
    # the attention and the network. A collective's stream holds them for some time after they are freed.
    whole = 4 * hidden if tp > 1 else 0.0
    logits = tokens * model.shape.vocabulary / tp
    loss = logits * (program.loss.whole if tp == 1 else program.loss.divided)
    head = hidden * (1 / tp + 1)  # the last norm's input, and the head's, gathered
    again = max(0.0, everything - kept) + whole / 2 + next_layer
    first = kept * layers * in_flight(layout, micro_batches)
    last = kept * layers
    if layout.pp == 1:
        activations, working = last + head, max(loss, again)
    else:
        activations, working = max((first, again), (last + head, loss), key=sum)
    return Memory(
        weights=(MASTER_BYTES * sharded if fully else size * total) + gathered,
        gradients=copies * GRADIENT_BYTES * (sharded if fully else total),
        optimizer=optimizer * (total if layout.sharding is Sharding.DDP else sharded),
        activations=activations,
        working=working,
        idle=(size * max(ends, 2 * layer) if fully else 0.0) + (size * logits if working == loss else 0.0) + whole,
    )
