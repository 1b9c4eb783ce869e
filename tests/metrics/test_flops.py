from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from holdfast.metrics.flops import GATED, MIXTURES, PLAIN, ModelShape, model_shape

LLAMA_3_8B = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, vocabulary=128_256, intermediate=14_336
)  # fmt: skip


def test_llama_3_8b_at_8192_tokens_needs_what_is_published_in_both_ways():
    """57.91 GFLOP a token is TorchTitan's count, 51.47 that of Megatron Bridge and MaxText."""
    needs = LLAMA_3_8B.per_token(8192)
    assert needs is not None
    assert needs.causal is not None
    assert needs.full == pytest.approx(57.91e9, rel=1e-4)
    assert needs.causal == pytest.approx(51.47e9, rel=1e-4)


SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
ONE_HEAD_EACH: dict[str, Any] = {**SMALL, "num_key_value_heads": 4}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    **{kind: {**SMALL, "head_dim": 8} for kind in GATED},
    **dict.fromkeys(PLAIN, ONE_HEAD_EACH),
    "mixtral": {**SMALL, "num_experts_per_tok": 2, "num_local_experts": 4},
    "olmoe": {**SMALL, **EXPERTS},
    "qwen2_moe": {**SMALL, **EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**SMALL, **EXPERTS, "moe_intermediate_size": 24, "head_dim": 16},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_known_kind_of_model_needs_what_torch_counts_in_it(kind: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    sequences, length = 3, 16
    config = AutoConfig.for_model(kind, **CONFIGS[kind], use_cache=False)
    # What is counted of torch's fused kernels is not what a model needs: attention's backward does its scores again.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    tokens = torch.randint(0, 96, (sequences, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    known = model_shape(config.to_dict())
    needs = known and known.per_token(length)
    assert needs is not None
    assert needs.full == counter.get_total_flops() / (sequences * length)


def test_every_known_kind_has_a_model_that_is_counted():
    assert set(CONFIGS) == {*GATED, *PLAIN, *MIXTURES, "gpt2"}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "bert"},
        {**SMALL, **EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [0]},
    ],
)
def test_nothing_is_claimed_of_a_model_that_is_not_known_for_sure(config: dict[str, Any]):
    assert model_shape(config) is None


@pytest.mark.parametrize(("switched_on", "claimed"), [(True, (True, False)), (False, (True, True))])
def test_nothing_is_claimed_of_sequences_longer_than_a_window(switched_on: bool, claimed: tuple[bool, bool]):
    config = {**SMALL, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": switched_on}
    known = model_shape(config)
    assert known is not None
    assert (known.per_token(4096) is not None, known.per_token(4097) is not None) == claimed
