"""Training FLOPs per token of a transformer.

The count includes the matrix products of the forward pass and twice as many for the backward pass, with one
multiplication and one addition each. As usual, it excludes recomputation by activation checkpointing. It excludes
embedding look-ups and includes the head. There are two conventions for attention's products of queries with keys and
of weights with values, so every figure names its convention:

  full    every token attends to every token of its sequence. PaLM's appendix B (arXiv 2204.02311), TorchTitan.
  causal  a token attends to itself and those before it, on average half. Megatron Bridge, MaxText.

For Llama 3 8B at 8,192 tokens these give 57.91 and 51.47 GFLOP. devices.py has the devices' peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

TRAINING = 3
"""Factor for training: one forward pass, and twice its cost for the gradients of inputs and weights."""
PRODUCT = 2
"""FLOPs per multiply-add."""


class FlopsPerToken(Struct, frozen=True, kw_only=True):
    """Training FLOPs per token in each convention; None if only the other is known."""

    full: float
    causal: float | None = None


class ModelShape(Struct, frozen=True, kw_only=True):
    """Shape of a decoder, as far as it determines FLOPs; sizes in elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int
    """Intermediate size of a dense layer's feed-forward network."""
    projections: int = 3
    """Number of matrices of a feed-forward network: 3 if gated, else 2."""
    experts: int = 0
    """Experts per layer; 0 for a dense model."""
    active_experts: int = 0
    """Experts that each token passes through."""
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Total intermediate size of the shared experts, which every token passes through."""
    window: int | None = None
    """Attention window in tokens; none means all previous tokens."""

    @property
    def active_weights(self) -> int:
        """Weights multiplied for each token, excluding attention scores."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.experts:
            widths = self.active_experts * self.expert_intermediate + self.shared_intermediate
            gates = self.experts + bool(self.shared_intermediate)
            feed_forward = self.hidden * (self.projections * widths + gates)
        else:
            feed_forward = self.projections * self.hidden * self.intermediate
        return self.layers * (attention + feed_forward) + self.hidden * self.vocabulary

    def per_token(self, length: int) -> FlopsPerToken | None:
        """FLOPs per token in sequences of `length` tokens; None if the window is shorter."""
        if self.window is not None and length > self.window:
            return None
        weights = TRAINING * PRODUCT * self.active_weights
        # Attention scores and their products with the values, per attended token.
        for_each = TRAINING * PRODUCT * self.layers * self.heads * self.head_dim * 2
        return FlopsPerToken(full=weights + for_each * length, causal=weights + for_each * (length + 1) / 2)


GATED = ("cohere", "gemma", "glm", "granite", "helium", "llama", "mistral", "olmo", "olmo2", "phi3", "qwen2", "qwen3")
"""Model types (`model_type`) with standard config names and a gated feed-forward network."""
PLAIN = ("gpt_neox", "phi", "starcoder2")
"""The same without a gate."""
MIXTURES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Gated model types with experts in every layer."""


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape from a transformers config (`to_dict()`); None for model types not listed here."""
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
