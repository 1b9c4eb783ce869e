"""Owns how many floating-point operations a transformer needs for a token that it is trained on.

Counted are the matrix products of forward and twice as many for backward, a multiplication and an addition each; what
activation checkpointing does again is not, as everywhere. Embeddings are looked up, which is no product; the head is
one. Attention's products of queries with keys and of weights with values are counted in one of two ways, and a figure
without its way says nothing:

  full    every token attends to every token of its sequence. PaLM's appendix B (arXiv 2204.02311), TorchTitan.
  causal  a token attends to itself and those before it, on average half. Megatron Bridge, MaxText.

For Llama 3 8B at 8,192 tokens that is 57.91 against 51.47 GFLOP. Refuses to own what a device can do (devices.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

TRAINING = 3
"""Forward once, and backward twice: for the gradients of inputs and of weights."""
PRODUCT = 2
"""A multiplication and an addition."""


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """FLOPs of training on one token, in each way of counting; None where only the other is known."""

    full: float
    causal: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What of a decoder's shape matters; sizes in elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int
    """Of a dense layer's feed-forward network."""
    projections: int = 3
    """Matrices of a feed-forward network: 3 where a gate multiplies one of them, else 2."""
    experts: int = 0
    """Experts of a layer that has them; 0 is a dense model."""
    active_experts: int = 0
    """Of these each token passes through so many."""
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Of the experts together that every token passes through."""
    window: int | None = None
    """Tokens that one attends to at most; none means all before it."""

    @property
    def active_weights(self) -> int:
        """Weights whose products a token takes part in, those of attention's scores aside."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.experts:
            widths = self.active_experts * self.expert_intermediate + self.shared_intermediate
            gates = self.experts + bool(self.shared_intermediate)
            feed_forward = self.hidden * (self.projections * widths + gates)
        else:
            feed_forward = self.projections * self.hidden * self.intermediate
        return self.layers * (attention + feed_forward) + self.hidden * self.vocabulary

    def per_token(self, length: int) -> FlopsPerToken | None:
        """FLOPs for one token of sequences of `length` tokens; none where a window is shorter than that."""
        if self.window is not None and length > self.window:
            return None
        weights = TRAINING * PRODUCT * self.active_weights
        # Scores, and their products with the values, against each of the tokens attended to.
        for_each = TRAINING * PRODUCT * self.layers * self.heads * self.head_dim * 2
        return FlopsPerToken(full=weights + for_each * length, causal=weights + for_each * (length + 1) / 2)


GATED = ("cohere", "gemma", "glm", "granite", "helium", "llama", "mistral", "olmo", "olmo2", "phi3", "qwen2", "qwen3")
"""Kinds (`model_type`) with the common names in their config, whose feed-forward network has a gate."""
PLAIN = ("gpt_neox", "phi", "starcoder2")
"""The same without a gate."""
MIXTURES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""The same as gated ones, with experts in every layer."""


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a transformers config (its `to_dict()`) describes; None for kinds that are not known for sure."""
    kind = config.get("model_type")
    if kind == "gpt2":
        return ModelShape(
            layers=config["n_layer"],
            hidden=config["n_embd"],
            heads=config["n_head"],
            kv_heads=config["n_head"],
            head_dim=config["n_embd"] // config["n_head"],
            vocabulary=config["vocab_size"],
            intermediate=config.get("n_inner") or 4 * config["n_embd"],
            projections=2,
        )
    if kind not in (*GATED, *PLAIN, *MIXTURES) or _uneven(config):
        return None
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dense = ModelShape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocabulary=config["vocab_size"],
        intermediate=config["intermediate_size"],
        projections=2 if kind in PLAIN else 3,
        window=config.get("sliding_window") if config.get("use_sliding_window", True) else None,
    )
    return _with_experts(dense, config) if kind in MIXTURES else dense


def _uneven(config: Mapping[str, Any]) -> bool:
    """Whether only some of the layers have experts."""
    return bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1


def _with_experts(dense: ModelShape, config: Mapping[str, Any]) -> ModelShape:
    return replace(
        dense,
        experts=config.get("num_local_experts") or config["num_experts"],
        active_experts=config["num_experts_per_tok"],
        expert_intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
        shared_intermediate=config.get("shared_expert_intermediate_size") or 0,
    )
