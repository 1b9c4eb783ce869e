"""Time of one training step of a layout: compute, exposed communication, pipeline bubble, optimizer.

The model adds, per layer and micro-batch: products at a share of the device's peak, and a share of the time to move
their operands; fused attention over its causal FLOPs; elementwise kernels at the memory's rate; collectives by bytes
over bus bandwidth; and host time per layer. A part of each kind of communication hides behind compute. The constants
are fitted to published runs; docs/plan.md says how closely. The file is long because a step is one sum.
"""

from __future__ import annotations

import math
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from holdfast.plan.collectives import Library
from holdfast.plan.hardware import TERA, Machine
from holdfast.plan.layout import Layout, Recompute, Sharding
from holdfast.plan.memory import COMPILED_LOSS, EAGER_LOSS, MEGATRON_LOSS, LossMemory, ProgramMemory, stage_parameters
from holdfast.plan.traffic import Step, step_traffic
from holdfast.plan.transformer import Transformer


class Precision(StrEnum):
    """Data type of the layers' matrix products; with fp8, attention and the head are in bf16."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP32 = "fp32"
    """Everything: what CPUs compute in."""


class Kernels(StrEnum):
    """Whose fused attention a program runs."""

    VENDOR = "vendor"
    """cuDNN's, or FlashAttention 3."""
    PORTABLE = "portable"
    """FlashAttention 2, on any GPU."""
    EARLY = "early"
    """The first generation of FlashAttention."""
    NONE = "none"
    """Separate kernels, which write all scores to memory."""


class Constants(Struct, frozen=True, kw_only=True):
    """What is fitted; shares are of 1."""

    operand_share: float = 0.662
    """Share of the time to move a product's operands that adds to its compute."""
    backward_attention: float = 2.86
    """Attention's backward pass over its forward pass: 2.5 times the FLOPs, at a lower rate."""
    narrow_heads: float = 0.113
    """Power of a head's width over 128 with which attention's rate falls for narrower heads."""
    fp8_casts: float = 0.646
    """Elementwise traffic of casts to fp8, over one read and two writes of each operand."""
    fsdp_overlap: float = 0.667
    """Share of compute behind which FSDP's collectives can hide."""
    contention: float = 0.13
    """Share of hidden communication that still costs time: it takes SMs and memory bandwidth."""
    expert_overlap: float = 0.849
    """Share of expert-parallel exchange that hides."""
    expert_imbalance: float = 2.16
    """The busiest expert-parallel rank's tokens over the average, and lower rates of grouped products."""
    collective_latency_s: float = 15e-6
    scale_loss: float = 0.00415
    """Loss per doubling of nodes: jitter and stragglers."""


class ContextExchange(Struct, frozen=True, kw_only=True):
    """How context-parallel ranks get each other's keys and values, part by part, and what merging the parts costs.

    All of them give each rank an early and a late part of the sequence, so that causal attention takes all as long.
    """

    source: str
    overlap: float = 0.0
    """Share of attention behind which the exchange can hide."""
    first_part_only: bool = False
    """Whether it hides behind the first part's attention, since one all-gather fetches the others."""
    repeats_heads: bool = False
    """Whether keys and values are sent once per head of the queries."""
    merge_bytes: int = 0
    """Memory traffic to merge the output for one more part, per element of the output."""
    gradient_bytes: int = 2
    """Bytes per element of the keys' and values' gradients, which the backward pass sends besides them."""


RING = ContextExchange(
    source="Transformer Engine, attention/dot_product_attention/context_parallel.py: `p2p`", overlap=0.8, merge_bytes=10
)
PYTORCH_RING = ContextExchange(
    source="PyTorch 2.6, torch/distributed/tensor/experimental/_attention.py; TorchTitan repeats the heads before it",
    overlap=0.8,
    first_part_only=True,
    repeats_heads=True,
    merge_bytes=38,
    gradient_bytes=4,
)
COMPILED_RING = replace(
    PYTORCH_RING,
    source="PyTorch 2.6, torch/distributed/_functional_collectives.py, `_maybe_wrap_tensor`: while `torch.compile` "
    "traces, a collective is waited for where it starts",
    overlap=0.0,
)
ALL_GATHER = ContextExchange(source="arXiv 2407.21783 (Llama 3), section 3.3.2: exposed, and attention runs once")


class Software(Struct, frozen=True, kw_only=True):
    """How a training program runs its kernels."""

    name: str
    traffic: float
    """Elementwise memory traffic over that of fused kernels."""
    host_s: float
    """Time per layer and pass that kernels wait for the host."""
    expert_host_s: float = 0.0
    """The same in layers with experts, if no CUDA graph launches their many small kernels."""
    expert_speedup: float = 1.0
    """How much faster experts' products are than separate ones: kernels that cast and activate too."""
    tensor_overlap: float = 0.0
    """Share of tensor-parallel communication that hides."""
    attention: Kernels = Kernels.VENDOR
    stops_early: bool = False
    """Whether recomputation skips each layer's last product, whose result no gradient needs, as PyTorch's does."""
    selective_products: float = 0.0
    """Share of the products that selective recomputation repeats."""
    selective_products_fp8: float = 0.0
    """The same in fp8. PyTorch's usual policy names the bf16 product only, so that every fp8 one is repeated."""
    fused_norms: bool = True
    """Whether RMSNorm and rotary embeddings are one kernel each; else each of their operations is one."""
    context: ContextExchange = RING
    cast_bytes: float = 0.0
    """Memory traffic per operand's element that is cast to fp8; 0 where `Constants.fp8_casts` gives it."""
    gradient_bytes: int = 4
    """Bytes per gradient in reductions."""
    eager: bool = False
    """Whether each operation keeps its own inputs."""
    loss: LossMemory = MEGATRON_LOSS
    torch_parallelism: bool = False
    """Whether parallelism is PyTorch's own."""


GATED = 3
"""Products of a gated network. Models with such networks have RMSNorm and rotary embeddings."""
NORM_BYTES = {2: 36, 4: 20}
"""Traffic of an unfused RMSNorm per element of so many bytes beyond a fused one's, which reads and writes it once.

PyTorch, aten/src/ATen/native/layer_norm.cpp, `rms_norm`: convert, square, mean, two products, convert back.
"""
ROTARY_BYTES = 16
"""The same of a rotary embedding: to fp32, product, and back."""
TORCHAO_CAST_BYTES = 6
"""Reads in bf16 for the largest value and for the cast, and writes in fp8 of both layouts.

pytorch/ao@042170ff590a, torchao/testing/float8/roofline_utils.py, `get_tensor_memory_traffic_ovhd_s`: `tensorwise`.
"""


SOFTWARE = {
    row.name: row
    for row in (
        Software(
            name="eager",
            traffic=1.35,
            host_s=60e-6,
            expert_host_s=0.74e-3,
            attention=Kernels.PORTABLE,
            stops_early=True,
            selective_products=0.5,
            selective_products_fp8=1.0,
            fused_norms=False,
            context=PYTORCH_RING,
            eager=True,
            loss=EAGER_LOSS,
            torch_parallelism=True,
        ),
        Software(
            name="eager-2023",
            traffic=1.35,
            host_s=60e-6,
            attention=Kernels.EARLY,
            stops_early=True,
            selective_products=0.5,
            eager=True,
            loss=EAGER_LOSS,
            torch_parallelism=True,
        ),
        Software(
            name="compiled",
            traffic=0.813,
            host_s=20e-6,
            expert_host_s=0.74e-3,
            attention=Kernels.PORTABLE,
            stops_early=True,
            selective_products=0.5,
            selective_products_fp8=1.0,
            context=COMPILED_RING,
            cast_bytes=TORCHAO_CAST_BYTES,
            loss=COMPILED_LOSS,
            torch_parallelism=True,
        ),
        Software(name="megatron", traffic=1.2, host_s=20e-6, tensor_overlap=0.68, gradient_bytes=2),
        Software(
            name="megatron-without-graphs",
            traffic=1.2,
            host_s=20e-6,
            expert_host_s=0.74e-3,
            tensor_overlap=0.68,
            gradient_bytes=2,
        ),
        Software(
            name="megatron-fused-experts",
            traffic=1.2,
            host_s=20e-6,
            expert_speedup=1.77,
            tensor_overlap=0.68,
            gradient_bytes=2,
        ),
        Software(name="megatron-2022", traffic=1.23, host_s=40e-6, attention=Kernels.NONE),
    )
}
"""Kinds of training programs.

PyTorch without a compiler, today and in 2023; compiled; Megatron-LM and NeMo, with CUDA graphs and without; with fused
kernels of experts; Megatron-LM before fused attention.
"""


class Workload(Struct, frozen=True, kw_only=True):
    """What is trained, and how."""

    model: Transformer
    length: int
    """Tokens per sequence."""
    batch: int
    """Sequences per step, of all data-parallel ranks."""
    precision: Precision = Precision.BF16
    software: Software = SOFTWARE["megatron"]

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.length

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation's element, and of a weight that products read."""
        return 4 if self.precision is Precision.FP32 else 2

    @property
    def repeated_products(self) -> float:
        """Share of the products that selective recomputation repeats."""
        software = self.software
        return software.selective_products_fp8 if self.precision is Precision.FP8 else software.selective_products

    @property
    def program(self) -> ProgramMemory:
        """What the program keeps in memory."""
        software = self.software
        return ProgramMemory(
            element_bytes=self.element_bytes,
            repeated=software.selective_products,  # TorchTitan publishes as much memory for fp8
            eager=software.eager,
            fused_norms=software.fused_norms,
            loss=software.loss,
            torch_parallelism=software.torch_parallelism,
        )


class StepTime(Struct, frozen=True, kw_only=True):
    """Seconds of a step by what they are spent on; communication is what compute does not hide."""

    matmul: float
    attention: float
    elementwise: float
    recompute: float
    host: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    bubble: float
    data: float
    optimizer: float
    scale: float

    @property
    def total(self) -> float:
        """The whole step."""
        return (
            self.matmul + self.attention + self.elementwise + self.recompute + self.host
            + self.tensor + self.context + self.expert + self.pipeline + self.bubble
            + self.data + self.optimizer + self.scale
        )  # fmt: skip


def group_rate(machine: Machine, size: int, inside: int) -> float:
    """Bus bandwidth of a ring over `size` ranks, of which neighbours are `inside` ranks apart, in bytes/s."""
    here = max(1, min(size, machine.domain // max(1, inside)))
    if here >= size:
        return machine.link_rate
    return min(machine.link_rate, machine.network_rate * here)


class _Layer(Struct, frozen=True):
    """Forward seconds of one layer for one micro-batch; the backward pass's share of each is in `step_time`."""

    matmul: float
    attention: float
    attention_backward: float
    elementwise: float
    casts: float
    host: float
    tensor: float
    context: float
    context_backward: float
    expert: float


def _products(flops: float, elements: float, rate: float, memory_rate: float, constants: Constants) -> float:
    return flops / rate + constants.operand_share * 2 * elements / memory_rate


def _layer(load: Workload, layout: Layout, machine: Machine, constants: Constants) -> _Layer:
    model, shape, gpu, software = load.model, load.model.shape, machine.gpu, load.software
    tp, hidden, latent = layout.tp, shape.hidden, model.latent
    tokens = layout.micro_batch * load.length / layout.cp
    peak = (gpu.peak.peak_tflops or 0.0) * TERA
    rate = peak * gpu.matmul
    if machine.cpu:
        products = 4 + shape.projections
        rate = machine.cpu.product_rate(math.sqrt((model.attention_weights + model.dense_weights) / products))
    fp8 = load.precision is Precision.FP8 and gpu.matmul_fp8 is not None and gpu.peak.fp8 is not None
    if fp8:
        rate = (gpu.peak.fp8 or 0.0) * TERA * (gpu.matmul_fp8 or 0.0)
    memory_rate = gpu.memory_rate * gpu.memory
    mixed = model.mixture_layers / shape.layers

    # Products of every token: attention's projections, dense networks, shared experts.
    dense = model.attention_weights + (1 - mixed) * model.dense_weights + mixed * model.shared_weights
    widths = (1 - mixed) * shape.intermediate + mixed * shape.shared_intermediate
    fed = 2 * hidden + model.query_width + model.kv_width + model.value_width + hidden
    fed += shape.projections * widths + (hidden if widths else 0)
    matmul = _products(2 * dense * tokens / tp, (dense + fed * tokens) / tp, rate, memory_rate, constants)
    traffic = 12 * hidden + 2 * (model.query_width + model.kv_width) + (shape.projections) * widths
    expert = 0.0
    if mixed:
        copies = mixed * shape.active_experts * tokens / tp
        local = mixed * shape.experts / layout.ep * model.expert_weights
        each = shape.projections * shape.expert_intermediate + 2 * hidden
        flops = 2 * copies * model.expert_weights
        grouped = _products(flops, local + copies * each, rate, memory_rate, constants)
        matmul += constants.expert_imbalance / software.expert_speedup * grouped
        traffic += mixed * shape.active_experts * (4 * hidden + shape.projections * shape.expert_intermediate)
        if layout.ep > 1:
            expert = _exchange(load, layout, machine, copies)
    casts = 0.0
    if fp8:
        # The forward pass casts inputs, the backward one gradients of outputs: a third of all in each of three passes.
        each = software.cast_bytes / 3 or constants.fp8_casts * 1.5 * load.element_bytes * software.traffic
        operands = (fed + mixed * shape.active_experts * hidden) * tokens / tp
        casts = each * operands / memory_rate
    if latent:
        traffic += 4 * ((latent.query_rank or 0) + latent.kv_rank)
    moved = load.element_bytes * software.traffic * traffic
    if not software.fused_norms and shape.projections == GATED:
        moved += 2 * NORM_BYTES[load.element_bytes] * hidden + ROTARY_BYTES * (model.query_width + model.kv_width / 2)
    elementwise = moved * tokens / tp / memory_rate

    attention, backward = _attention(load, layout, machine, tokens, constants)
    tensor = 0.0
    if tp > 1:
        moved = 4 * (tp - 1) / tp * tokens * hidden * 2  # two pairs of all-gather and reduce-scatter
        tensor = moved / group_rate(machine, tp, 1) + 4 * constants.collective_latency_s
        tensor *= 1 - software.tensor_overlap
    context = context_backward = 0.0
    if layout.cp > 1:
        context, context_backward = _context_exchange(load, layout, machine, tokens, attention)
    return _Layer(
        matmul,
        attention,
        backward,
        elementwise,
        casts,
        LAYER_OPERATIONS * machine.cpu.operation_s if machine.cpu else software.host_s + mixed * software.expert_host_s,
        tensor,
        context,
        context_backward,
        expert * (1 - constants.expert_overlap),
    )


def _context_exchange(
    load: Workload, layout: Layout, machine: Machine, tokens: float, attention: float
) -> tuple[float, float]:
    """Exposed seconds of fetching the other parts' keys and values, and of merging: forward, backward."""
    model, how, others = load.model, load.software.context, layout.cp - 1
    width = model.query_width + model.value_width if how.repeats_heads else model.kv_width
    sent = others * tokens * width / layout.tp * 2 / group_rate(machine, layout.cp, layout.tp)
    hidden = how.overlap * attention / (layout.cp if how.first_part_only else 1)
    merged = others * tokens * model.value_width / layout.tp
    merging = how.merge_bytes * merged / (machine.gpu.memory_rate * machine.gpu.memory)
    exposed = max(0.1 * sent, sent - hidden)
    return exposed + merging, (1 + how.gradient_bytes / 2) * exposed + 2 * merging


def _exchange(load: Workload, layout: Layout, machine: Machine, copies: float) -> float:
    """Seconds of sending tokens to their experts and back, in a forward pass."""
    ep, hidden = layout.ep, load.model.shape.hidden
    here = max(1, min(ep, machine.domain // layout.tp))
    sent = 2 * copies * hidden * 2
    outside = 1 - here / ep
    inside = sent * (here - 1) / ep / machine.link_rate if here > 1 else 0.0
    # A token goes to each node once, and there to its experts over the link.
    nodes = ep / here
    active = load.model.shape.active_experts
    once = nodes * (1 - (1 - 1 / nodes) ** active) / active if nodes > 1 else 1.0
    return inside + sent * outside * once / machine.network_rate + sent * outside / machine.link_rate


def _attention(
    load: Workload, layout: Layout, machine: Machine, tokens: float, constants: Constants
) -> tuple[float, float]:
    """Seconds of attention's scores and weighted sums in one layer: forward, backward."""
    model, gpu = load.model, machine.gpu
    peak = (gpu.peak.peak_tflops or 0.0) * TERA
    if load.software.attention is not Kernels.NONE:
        flops = 2 * (model.query_width + model.value_width) * tokens * load.length / 2 / layout.tp
        width = model.shape.head_dim
        share = {Kernels.PORTABLE: gpu.attention_portable, Kernels.EARLY: gpu.attention_early}.get(
            load.software.attention, gpu.attention
        )
        reached = share * min(1.0, width / 128) ** constants.narrow_heads
        forward = flops / (peak * reached)
        return forward, constants.backward_attention * forward
    # Two batched products over all scores, and softmax, mask and dropout, each of which reads and writes them.
    flops = 2 * (model.query_width + model.value_width) * tokens * load.length / layout.tp
    scores = model.shape.heads * tokens * load.length / layout.tp
    forward = flops / (peak * 0.5 * gpu.matmul) + 2 * 7 * scores / (gpu.memory_rate * gpu.memory)
    return forward, 2 * forward


def step_time(load: Workload, layout: Layout, machine: Machine, constants: Constants | None = None) -> StepTime:
    """Seconds of one step."""
    constants = constants or (ON_CPU if machine.cpu else DEFAULT)
    model, shape, gpu, software = load.model, load.model.shape, machine.gpu, load.software
    layer = _layer(load, layout, machine, constants)
    memory_rate = gpu.memory_rate * gpu.memory
    count = layout.micro_batches(load.batch)
    layers = shape.layers / layout.pp
    deepest = math.ceil(layers)
    tokens = layout.micro_batch * load.length / layout.cp

    again = 0.0
    if layout.recompute is Recompute.FULL:
        again = layer.matmul + layer.attention + layer.elementwise + layer.casts + layer.host
        again += layer.tensor + layer.expert + layer.context
        if software.stops_early:
            again -= layer.matmul * _last_product(model)
    elif layout.recompute is Recompute.SELECTIVE:
        again = 0.5 * layer.elementwise if software.attention is not Kernels.NONE else layer.attention
        again += load.repeated_products * (layer.matmul + layer.casts)
        if load.repeated_products == 1.0 and software.stops_early:
            again -= layer.matmul * _last_product(model)
    each = (
        3 * (layer.matmul + layer.elementwise + layer.casts + layer.host)
        + layer.attention + layer.attention_backward + layer.context + layer.context_backward
        + 2 * (layer.tensor + layer.expert)
        + again
    )  # fmt: skip

    # The head: a product, and the loss, which reads and writes the logits in fp32.
    logits = tokens * shape.vocabulary / layout.tp
    peak = (gpu.peak.peak_tflops or 0.0) * TERA
    wide = math.sqrt(model.embedding_weights)
    head_matmul = 3 * _products(
        2 * tokens * model.embedding_weights / layout.tp,
        logits + model.embedding_weights / layout.tp,
        machine.cpu.product_rate(wide) if machine.cpu else peak * gpu.matmul,
        memory_rate,
        constants,
    )
    head_traffic = 16 * software.traffic * logits / memory_rate
    head = head_matmul + head_traffic

    # The slowest stage sets the pace; stages that divide unevenly leave the last one a layer less.
    spare = 1 if deepest * layout.pp > shape.layers else 0
    pace = max(deepest * each, (deepest - spare) * each + head) if layout.pp > 1 else deepest * each + head
    average = layers * each + head / layout.pp
    work = count * average
    bubble = count * (pace - average)
    pipeline = 0.0
    if layout.pp > 1:
        bubble += (layout.pp - 1) / layout.interleave * average
        moved = 2 * tokens * shape.hidden * 2 / layout.tp
        sends = count * (layout.interleave if layout.interleave > 1 else 1)
        neighbour = layout.tp * layout.cp * layout.dp
        rate = machine.link_rate if neighbour < machine.domain else machine.network_rate
        hidden = 0.8 if layout.interleave > 1 else 0.0
        pipeline = (1 - hidden) * sends * (moved / rate + 2 * constants.collective_latency_s)

    data, optimizer = _data_parallel(load, layout, machine, constants, average, count)
    parts = count * layers
    nodes = max(1.0, layout.gpus / machine.domain)
    busy = work + bubble + pipeline + data + optimizer
    return StepTime(
        matmul=parts * 3 * layer.matmul + count * head_matmul / layout.pp,
        attention=parts * (layer.attention + layer.attention_backward),
        elementwise=parts * 3 * (layer.elementwise + layer.casts) + count * head_traffic / layout.pp,
        recompute=parts * again,
        host=parts * 3 * layer.host,
        tensor=parts * 2 * layer.tensor,
        context=parts * (layer.context + layer.context_backward),
        expert=parts * 2 * layer.expert,
        pipeline=pipeline,
        bubble=bubble,
        data=data,
        optimizer=optimizer,
        scale=busy * constants.scale_loss * math.log2(nodes) if nodes > 1 else 0.0,
    )


def _last_product(model: Transformer) -> float:
    """The share of a layer's products that its last one has."""
    per_token = model.shape.active_weights - model.embedding_weights
    shape = model.shape
    width = shape.active_experts * shape.expert_intermediate if shape.experts else shape.intermediate
    return shape.layers * shape.hidden * width / per_token


def _data_parallel(
    load: Workload, layout: Layout, machine: Machine, constants: Constants, micro_batch_s: float, count: int
) -> tuple[float, float]:
    """Exposed seconds of data-parallel collectives, and seconds of the optimizer."""
    dense, experts = stage_parameters(load.model, layout)
    ranks = layout.dp * layout.cp
    inside = layout.tp
    memory_rate = machine.gpu.memory_rate * machine.gpu.memory
    shards = min(ranks, machine.domain) if layout.sharding is Sharding.HSDP else ranks
    owned = (
        dense + experts
        if layout.sharding is Sharding.DDP
        else dense / shards + experts / max(1.0, shards * layout.tp / layout.ep)
    )
    optimizer = 30 * owned / memory_rate
    if machine.cpu:
        optimizer = machine.cpu.adamw_s * owned
    if ranks == 1:
        return 0.0, optimizer
    rate = group_rate(machine, ranks, inside)
    if machine.cpu:
        measured = machine.cpu.data_parallel if ranks <= machine.domain else None
        if measured and layout.sharding is Sharding.DDP:
            return measured.ddp_parameter_s * (dense + experts), optimizer
        if measured and layout.sharding is Sharding.FSDP:
            groups = load.model.shape.layers / layout.pp + 1  # what is outside of layers is gathered as one more
            each = measured.fsdp_layer_s * groups + measured.fsdp_parameter_s * (dense + experts)
            return count * each, optimizer
        sent = step_traffic(traffic_of(load, layout, machine))["dp"]
        copied = COPIED_BYTES[layout.sharding] * (dense + experts)
        return sent / rate + copied / machine.gpu.memory_rate, optimizer
    expert_ranks = max(1.0, ranks * layout.tp / layout.ep)
    expert_rate = machine.network_rate if layout.ep * layout.pp >= machine.domain else machine.link_rate

    def moved(bytes_each: float, group: float) -> float:
        whole = dense * bytes_each * (group - 1) / group / rate
        if expert_ranks > 1:
            whole += experts * bytes_each * (expert_ranks - 1) / expert_ranks / expert_rate
        return whole

    if layout.sharding in (Sharding.FSDP, Sharding.HSDP):
        if layout.sharding is Sharding.HSDP:
            gather = (dense + experts) * 2 * (shards - 1) / shards / group_rate(machine, shards, inside)
            across = 2 * software_bytes(load) * owned / machine.network_rate
        else:
            gather, across = moved(2, ranks), 0.0
        each = gather * (2 + software_bytes(load) / 2) + across / count
        exposed = count * max(constants.contention * each, each - constants.fsdp_overlap * micro_batch_s)
        return exposed, optimizer
    each = moved(software_bytes(load) + 2, ranks)
    # Reductions hide behind the last micro-batch's backward pass, gathers behind the first one's forward pass.
    window = constants.fsdp_overlap * micro_batch_s * (layout.pp if layout.interleave > 1 else 1) / layout.interleave
    return max(constants.contention * each, each - window), optimizer


def traffic_of(load: Workload, layout: Layout, machine: Machine) -> Step:
    """What a step sends, as plan/traffic.py counts it."""
    return Step(
        model=load.model,
        layout=layout,
        batch=load.batch,
        length=load.length,
        gradient_bytes=max(load.software.gradient_bytes, load.element_bytes),
        element_bytes=load.element_bytes,
        domain=machine.domain,
        library=Library.GLOO if machine.cpu else Library.NCCL,
    )


def software_bytes(load: Workload) -> int:
    """Bytes per gradient in reductions."""
    return load.software.gradient_bytes


DEFAULT = Constants()
ON_CPU = replace(DEFAULT, operand_share=0.0, narrow_heads=0.0, backward_attention=2.0, scale_loss=0.0)
"""What measured rates of training include already."""
LAYER_OPERATIONS = 45
"""Operations of a layer's forward pass in PyTorch without a compiler; a CPU does not hide what starting them costs."""
COPIED_BYTES = {Sharding.DDP: 16, Sharding.OPTIMIZER: 16, Sharding.FSDP: 24, Sharding.HSDP: 24}
"""Memory traffic per parameter in fp32 around collectives, which need contiguous memory.

DDP copies gradients into buckets and back. FSDP2 copies weights out of a buffer twice, and gradients into one.
"""
