"""Parameters and FLOPs of published models."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.plan.model_catalog import MODELS
from holdfast.plan.transformer import from_config

PUBLISHED = {
    "llama-3-8b": 8.03e9,
    "llama-3-70b": 70.55e9,
    "llama-3-405b": 405.85e9,
    "gpt-3-175b": 174.6e9,
    "megatron-530b": 529.6e9,
    "megatron-1t": 1008e9,
    "mpt-7b": 6_658_859_008,
    "mpt-70b": 64_862_437_376,
    "mixtral-8x7b": 46.70e9,
    "qwen-3-235b-a22b": 235.1e9,
    "deepseek-v3": 671e9,
}
"""As model cards and papers give them; MPT's from llm-foundry's table."""


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_those_published(name: str, parameters: float) -> None:
    assert MODELS[name].parameters == pytest.approx(parameters, rel=1e-3)


def test_flops_of_llama_3_8b_in_both_conventions() -> None:
    flops = MODELS["llama-3-8b"].flops(8192)
    assert flops.full == pytest.approx(57.91e9, rel=1e-4)
    assert flops.causal == pytest.approx(51.47e9, rel=1e-4)


def test_deepseek_v3_activates_37_billion_parameters_per_token() -> None:
    flops = MODELS["deepseek-v3"].flops(1)
    assert flops.full / 6 == pytest.approx(37e9, rel=0.02)  # the paper's 37B include the embedding


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 12,
        "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_of_a_config_are_those_that_transformers_makes(kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SIZES, **CONFIGS[kind], tie_word_embeddings=False)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    model = from_config(config.to_dict(), kind)
    assert model is not None
    assert model.parameters == pytest.approx(sum(each.numel() for each in made.parameters()), rel=2e-3)


def test_config_of_another_kind_is_not_guessed() -> None:
    assert from_config({"model_type": "mamba2"}, "x") is None
