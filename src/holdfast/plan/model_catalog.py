"""Published models by name, for jobs that have no config file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from holdfast.metrics.flops import ModelShape
from holdfast.plan.transformer import LatentAttention, Transformer


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv: int, intermediate: int, vocabulary: int = 32_000
) -> Transformer:
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        head_dim=hidden // heads,
        vocabulary=vocabulary,
        intermediate=intermediate,
    )
    return Transformer(name=name, shape=shape)


def _gpt(
    name: str, layers: int, hidden: int, heads: int, vocabulary: int = 51_200, *, positions: int = 2048
) -> Transformer:
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocabulary=vocabulary,
        intermediate=4 * hidden,
        projections=2,
    )
    return Transformer(name=name, shape=shape, tied=True, positions=positions, biases=True)


def _mpt(name: str, layers: int, hidden: int, heads: int) -> Transformer:
    made = _gpt(name, layers, hidden, heads, 50_368)
    return Transformer(name=name, shape=made.shape, tied=True, positions=2048)


def _nemotron(name: str, layers: int, hidden: int, heads: int, kv: int, intermediate: int) -> Transformer:
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        head_dim=hidden // heads,
        vocabulary=256_000,
        intermediate=intermediate,
        projections=2,
    )
    return Transformer(name=name, shape=shape)


def _mixture(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv: int,
    head_dim: int,
    vocabulary: int,
    experts: int,
    active: int,
    expert: int,
) -> Transformer:
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        head_dim=head_dim,
        vocabulary=vocabulary,
        intermediate=0,
        experts=experts,
        active_experts=active,
        expert_intermediate=expert,
    )
    return Transformer(name=name, shape=shape)


def _deepseek(name: str, heads: int, vocabulary: int, experts: int, dense_layers: int, layers: int = 61) -> Transformer:
    shape = ModelShape(
        layers=layers,
        hidden=7168,
        heads=heads,
        kv_heads=heads,
        head_dim=192,
        vocabulary=vocabulary,
        intermediate=18_432,
        experts=experts,
        active_experts=8,
        expert_intermediate=2048,
        shared_intermediate=2048,
    )
    latent = LatentAttention(query_rank=1536, kv_rank=512, rope_dim=64, value_dim=128)
    return Transformer(name=name, shape=shape, dense_layers=dense_layers, latent=latent)


_ROWS = (
    # arXiv 2407.21783, table 3
    _llama("llama-3-8b", 32, 4096, 32, 8, 14_336, 128_256),
    _llama("llama-3-70b", 80, 8192, 64, 8, 28_672, 128_256),
    _llama("llama-3-405b", 126, 16_384, 128, 8, 53_248, 128_256),
    # https://huggingface.co/meta-llama and codellama, config.json
    _llama("llama-2-7b", 32, 4096, 32, 32, 11_008),
    _llama("llama-2-13b", 40, 5120, 40, 40, 13_824),
    _llama("llama-2-34b", 48, 8192, 64, 8, 22_016),
    _llama("llama-2-70b", 80, 8192, 64, 8, 28_672),
    # arXiv 2302.13971, table 2
    _llama("llama-65b", 80, 8192, 64, 64, 22_016),
    # arXiv 2005.14165, table 2.1; arXiv 2205.05198, table 3
    _gpt("gpt-3-175b", 96, 12_288, 96),
    _gpt("megatron-22b", 48, 6144, 64),
    _gpt("megatron-530b", 105, 20_480, 128),
    _gpt("megatron-1t", 128, 25_600, 160),
    # https://github.com/NVIDIA/NeMo, GPT-3 20B and Nemotron recipes
    _gpt("gpt-3-20b", 44, 6144, 48),
    _nemotron("nemotron-3-8b", 32, 4096, 32, 32, 16_384),
    _nemotron("nemotron-3-22b", 40, 6144, 48, 48, 24_576),
    _nemotron("nemotron-4-340b", 96, 18_432, 96, 8, 73_728),
    # https://github.com/mosaicml/llm-foundry, scripts/train/yamls/pretrain
    _mpt("mpt-125m", 12, 768, 12),
    _mpt("mpt-350m", 24, 1024, 16),
    _mpt("mpt-760m", 24, 1536, 12),
    _mpt("mpt-1b", 24, 2048, 16),
    _mpt("mpt-3b", 32, 2560, 20),
    _mpt("mpt-7b", 32, 4096, 32),
    _mpt("mpt-13b", 40, 5120, 40),
    _mpt("mpt-30b", 48, 7168, 64),
    _mpt("mpt-70b", 80, 8192, 64),
    # config.json of each on https://huggingface.co
    _mixture("mixtral-8x7b", 32, 4096, 32, 8, 128, 32_000, 8, 2, 14_336),
    _mixture("mixtral-8x22b", 56, 6144, 48, 8, 128, 32_768, 8, 2, 16_384),
    _mixture("qwen-3-30b-a3b", 48, 2048, 32, 4, 128, 151_936, 128, 8, 768),
    _mixture("qwen-3-235b-a22b", 94, 4096, 64, 4, 128, 151_936, 128, 8, 1536),
    _deepseek("deepseek-v3", 128, 129_280, 256, 3),
    _deepseek("kimi-k2", 64, 163_840, 384, 1),
)

MODELS: Mapping[str, Transformer] = MappingProxyType({row.name: row for row in _ROWS})
"""All models by name."""
