"""Bytes that each rank sends to each other per step, by the algorithms of a communication library.

Ranks count up along `tp`, then `cp`, `dp`, `pp`. Context and expert parallelism's own messages are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from holdfast.plan.collectives import ALGORITHMS, Collective, Library
from holdfast.plan.layout import Layout, Sharding
from holdfast.plan.transformer import Transformer


class Message(Struct, frozen=True, kw_only=True):
    """What a rank sends to another per step."""

    axis: str
    """`dp`, `tp` or `pp`."""
    peer: int
    sent_bytes: float


class Step(Struct, frozen=True, kw_only=True):
    """What a step of a job sends."""

    model: Transformer
    layout: Layout
    batch: int
    """Sequences."""
    length: int
    """Tokens of a sequence."""
    gradient_bytes: int
    element_bytes: int = 2
    """Of activations, and of gathered weights."""
    domain: int = 8
    """Ranks that HSDP shards over."""
    library: Library = Library.NCCL

    @property
    def micro_batches(self) -> int:
        return self.layout.micro_batches(self.batch)

    @property
    def tokens(self) -> float:
        """Of each data-parallel rank."""
        return self.micro_batches * self.layout.micro_batch * self.length / self.layout.cp


class _Collective(Struct, frozen=True, kw_only=True):
    """An operation of a group; `payload` as in plan/collectives.py."""

    axis: str
    kind: Collective
    payload: float
    group: Sequence[int]


def ddp_bytes(parameters: float, ranks: int, *, gradient_bytes: int, library: Library = Library.NCCL) -> float:
    """DistributedDataParallel: one all-reduce of all gradients."""
    return ALGORITHMS[library, Collective.ALL_REDUCE].sent_bytes(parameters * gradient_bytes, ranks)


def step_traffic(step: Step) -> dict[str, float]:
    """Bytes that a rank of the busiest stage sends per step along each axis; zero where an axis has size 1."""
    layout = step.layout
    sent = {"dp": 0.0, "tp": 0.0, "pp": 0.0}
    for stage in range(layout.pp):
        of_rank = list(rank_traffic(step, stage * layout.gpus // layout.pp))
        for axis, most in sent.items():
            sent[axis] = max(most, sum(each.sent_bytes for each in of_rank if each.axis == axis))
    return sent


def between_stages(layout: Layout, sent_bytes: float) -> float:
    """Bytes in both directions between two neighbouring ranks of a pipeline, given what `step_traffic` has for `pp`.

    A middle stage sends as much, half of it to each side. Each of two stages sends one chunk less.
    """
    both = 2 * layout.interleave
    return sent_bytes * both / (both - (layout.pp == 2))


def rank_traffic(step: Step, rank: int) -> Iterator[Message]:
    """What a rank sends per step."""
    layout = step.layout
    width = layout.gpus // layout.pp
    stage, place = divmod(rank, width)
    first = rank - place % layout.tp
    tensor, data = range(first, first + layout.tp), range(stage * width + place % layout.tp, (stage + 1) * width)
    collectives = [*_tensor(step, stage, tensor), *_data(step, stage, data[:: layout.tp], rank)]
    for one in collectives:
        ranks = len(one.group)
        if ranks > 1:
            algorithm = ALGORITHMS[step.library, one.kind]
            peer = one.group[(one.group.index(rank) + algorithm.neighbour) % ranks]
            yield Message(axis=one.axis, peer=peer, sent_bytes=algorithm.sent_bytes(one.payload, ranks))
    yield from _pipeline(step, stage, place, width)


def _tensor(step: Step, stage: int, group: Sequence[int]) -> Iterator[_Collective]:
    """All-reduces of activations: two per layer forward and two backward, and one in the embedding and the head each.

    With sequence parallelism each is a reduce-scatter and an all-gather, which send as much in NCCL's rings.
    """
    last = stage == step.layout.pp - 1
    number = 4 * _layers(step, stage) + (stage == 0) + last
    payload = number * step.tokens * step.model.shape.hidden * step.element_bytes
    yield _Collective(axis="tp", kind=Collective.ALL_REDUCE, payload=payload, group=group)


def _data(step: Step, stage: int, group: Sequence[int], rank: int) -> Iterator[_Collective]:
    """Gradients, and where they are sharded weights, of a stage's part that a rank holds."""
    parameters, ends = stage_weights(step, stage)
    gradients, passes = parameters * step.gradient_bytes, step.micro_batches

    def of(kind: Collective, payload: float, ranks: Sequence[int] = group) -> _Collective:
        return _Collective(axis="dp", kind=kind, payload=payload, group=ranks)

    # The root module, which holds embedding and head, stays gathered from a micro-batch's forward pass to its backward
    # pass (FSDP2), and is gathered again for the next micro-batch.
    gathered = passes * (2 * parameters - ends) * step.element_bytes
    match step.layout.sharding:
        case Sharding.DDP:
            yield of(Collective.ALL_REDUCE, gradients)
        case Sharding.OPTIMIZER:
            yield of(Collective.REDUCE_SCATTER, gradients)
            yield of(Collective.ALL_GATHER, parameters * step.element_bytes)
        case Sharding.FSDP:
            yield of(Collective.ALL_GATHER, gathered)
            yield of(Collective.REDUCE_SCATTER, passes * gradients)
        case Sharding.HSDP:
            shards = min(len(group), step.domain)
            place = group.index(rank)
            own = group[place - place % shards :][:shards]
            yield of(Collective.ALL_GATHER, gathered, own)
            yield of(Collective.REDUCE_SCATTER, passes * gradients, own)
            yield of(Collective.ALL_REDUCE, passes * gradients / shards, group[place % shards :: shards])


def _pipeline(step: Step, stage: int, place: int, width: int) -> Iterator[Message]:
    """Activations to the next stage and their gradients to the one before, for each chunk of the model."""
    stages = step.layout.pp
    for way, end in ((1, stages - 1), (-1, 0)):
        chunks = step.layout.interleave - (stage == end)
        if chunks and stages > 1:
            peer = (stage + way) % stages * width + place
            yield Message(axis="pp", peer=peer, sent_bytes=chunks * _handed_on(step))


def _handed_on(step: Step) -> float:
    """Bytes of a rank's activations between two stages; with tensor parallelism each rank of a group sends its part."""
    return step.tokens * step.model.shape.hidden * step.element_bytes / step.layout.tp


def stage_weights(step: Step, stage: int) -> tuple[float, float]:
    """Parameters per rank of a pipeline stage before sharding, and those of them in embedding, head and last norm."""
    model, layout, shape = step.model, step.layout, step.model.shape
    last = layout.pp - 1
    tied = model.tied and layout.pp == 1
    tables = (stage == 0) * (model.embedding_weights + model.positions * shape.hidden)
    tables += (stage == last and not tied) * model.embedding_weights
    ends = tables / layout.tp + (stage == last) * shape.hidden * (2 if model.biases else 1)
    mixtures = model.mixture_layers / shape.layers
    each = model.attention_weights + (1 - mixtures) * model.dense_weights + mixtures * model.shared_weights
    layers = _layers(step, stage)
    experts = layers / shape.layers * model.expert_parameters / layout.ep
    return layers * (each / layout.tp + model.norm_weights) + ends + experts, ends


def _layers(step: Step, stage: int) -> int:
    layers, stages = step.model.shape.layers, step.layout.pp
    return layers * (stage + 1) // stages - layers * stage // stages
