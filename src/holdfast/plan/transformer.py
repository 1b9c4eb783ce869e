"""A transformer as the planner sees it: parameters and FLOPs from its config."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from msgspec import Struct

from holdfast.metrics.flops import PRODUCT, TRAINING, FlopsPerToken, ModelShape, model_shape

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
"""Model types (`model_type`) with multi-head latent attention."""
WITH_BIASES = ("gpt2", "gpt_neox", "starcoder2")


class LatentAttention(Struct, frozen=True, kw_only=True):
    """Ranks and head sizes of multi-head latent attention (MLA), in elements."""

    query_rank: int | None
    """None if queries are not compressed."""
    kv_rank: int
    rope_dim: int
    value_dim: int


class Transformer(Struct, frozen=True, kw_only=True, dict=True):
    """A decoder, as far as it determines memory and time."""

    name: str
    shape: ModelShape
    """With latent attention, `head_dim` is that of queries and keys, position part included."""
    dense_layers: int = 0
    """Leading layers of a mixture that have no experts."""
    latent: LatentAttention | None = None
    tied: bool = False
    """Whether embedding and head are one matrix."""
    positions: int = 0
    """Learned position embeddings."""
    biases: bool = False

    @cached_property
    def query_width(self) -> int:
        """Total width of the queries of all heads."""
        return self.shape.heads * self.shape.head_dim

    @cached_property
    def value_width(self) -> int:
        """Total width of attention's output before its projection."""
        return self.shape.heads * self.latent.value_dim if self.latent else self.query_width

    @cached_property
    def kv_width(self) -> int:
        """Width of the keys and values of all heads together, as attention reads them."""
        if self.latent:
            return self.query_width + self.value_width
        return 2 * self.shape.kv_heads * self.shape.head_dim

    @cached_property
    def attention_weights(self) -> int:
        """Weights of one layer's attention."""
        hidden = self.shape.hidden
        if self.latent is None:
            return hidden * (2 * self.query_width + self.kv_width)
        heads, latent = self.shape.heads, self.latent
        rank = latent.query_rank
        queries = hidden * self.query_width if rank is None else rank * (hidden + self.query_width)
        down = hidden * (latent.kv_rank + latent.rope_dim)
        up = latent.kv_rank * heads * (self.shape.head_dim - latent.rope_dim + latent.value_dim)
        return queries + down + up + hidden * self.value_width

    @cached_property
    def dense_weights(self) -> int:
        """Weights of one dense layer's feed-forward network."""
        return self.shape.projections * self.shape.hidden * self.shape.intermediate

    @cached_property
    def expert_weights(self) -> int:
        """Weights of one routed expert; 0 for a dense model."""
        return self.shape.projections * self.shape.hidden * self.shape.expert_intermediate

    @cached_property
    def shared_weights(self) -> int:
        """Weights of a layer's router and shared experts; 0 for a dense model."""
        shape = self.shape
        return shape.hidden * (shape.projections * shape.shared_intermediate + shape.experts) if shape.experts else 0

    @cached_property
    def mixture_layers(self) -> int:
        """Layers with experts."""
        return self.shape.layers - self.dense_layers if self.shape.experts else 0

    @cached_property
    def norm_weights(self) -> int:
        """Weights of norms and biases in one layer."""
        hidden, latent = self.shape.hidden, self.latent
        if self.biases:  # two layer norms with biases, and a bias per projection
            return 4 * hidden + 2 * hidden + self.query_width + self.kv_width + self.shape.intermediate
        return 2 * hidden + ((latent.query_rank or 0) + latent.kv_rank if latent else 0)

    @cached_property
    def embedding_weights(self) -> int:
        """Weights of the token embedding, which are also those of the head."""
        return self.shape.vocabulary * self.shape.hidden

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters that expert parallelism divides."""
        return self.mixture_layers * self.shape.experts * self.expert_weights

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        shape = self.shape
        layers = shape.layers * (self.attention_weights + self.norm_weights)
        dense = (shape.layers - self.mixture_layers) * self.dense_weights
        mixtures = self.mixture_layers * self.shared_weights + self.expert_parameters
        ends = self.embedding_weights * (1 if self.tied else 2) + self.positions * shape.hidden
        return layers + dense + mixtures + ends + shape.hidden * (2 if self.biases else 1)

    def flops(self, length: int) -> FlopsPerToken:
        """Training FLOPs per token in sequences of `length` tokens, in both conventions."""
        known = None if self.latent or self.dense_layers else self.shape.per_token(length)
        if known:
            return known
        shape = self.shape
        mixture = self.shared_weights + shape.active_experts * self.expert_weights
        weights = (
            shape.layers * self.attention_weights
            + (shape.layers - self.mixture_layers) * self.dense_weights
            + self.mixture_layers * mixture
            + self.embedding_weights
        )
        fixed = TRAINING * PRODUCT * weights
        for_each = TRAINING * PRODUCT * shape.layers * (self.query_width + self.value_width)
        return FlopsPerToken(full=fixed + for_each * length, causal=fixed + for_each * (length + 1) / 2)


def from_config(config: Mapping[str, Any], name: str) -> Transformer | None:
    """The model of a transformers config (`config.json`); None for model types that are not known.

    Raises KeyError for a config that lacks a size.
    """
    kind = config.get("model_type")
    tied = bool(config.get("tie_word_embeddings", kind == "gpt2"))
    if kind in LATENT:
        return _latent(config, name, tied)
    shape = model_shape(config)
    if shape is None:
        return None
    positions = config.get("n_positions", 1024) if kind == "gpt2" else 0
    return Transformer(name=name, shape=shape, tied=tied, positions=positions, biases=kind in WITH_BIASES)


def _latent(config: Mapping[str, Any], name: str, tied: bool) -> Transformer:
    heads, expert = config["num_attention_heads"], config.get("moe_intermediate_size") or 0
    shape = ModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=heads,
        head_dim=config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        vocabulary=config["vocab_size"],
        intermediate=config["intermediate_size"],
        experts=config.get("n_routed_experts") or 0,
        active_experts=config.get("num_experts_per_tok") or 0,
        expert_intermediate=expert,
        shared_intermediate=expert * (config.get("n_shared_experts") or 0),
    )
    latent = LatentAttention(
        query_rank=config.get("q_lora_rank"),
        kv_rank=config["kv_lora_rank"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )
    return Transformer(
        name=name, shape=shape, dense_layers=config.get("first_k_dense_replace", 0), latent=latent, tied=tied
    )
