"""Memory of layouts beside what papers state, and the arithmetic that reviewers do by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.plan.hardware import MACHINES
from holdfast.plan.layout import Layout, Recompute, Sharding
from holdfast.plan.memory import layer_activations, memory
from holdfast.plan.model_catalog import MODELS
from holdfast.plan.traffic import ddp_bytes

YEAR_S, DAY_S = 365.25 * 86_400, 86_400


def test_gradients_of_70b_take_140_gb_and_their_ring_sends_280() -> None:
    gradients = 70e9 * 2
    assert gradients == 140e9
    assert ddp_bytes(70e9, 1024, gradient_bytes=2) == pytest.approx(280e9, rel=0.01)


def test_a_training_of_67_years_on_one_a100_takes_24_days_on_2048_at_half_the_peak() -> None:
    """6.6e23 FLOPs, such as 6 N D of 70B parameters and 1.57T tokens; the 67 years are at the full peak."""
    peak = (MACHINES["a100-hdr"].gpu.peak.bf16 or 0) * 1e12
    flops = 6 * 70e9 * 1.57e12
    assert flops / peak / YEAR_S == pytest.approx(67, rel=0.01)
    assert flops / (2048 * peak * 0.5) / DAY_S == pytest.approx(24, rel=0.01)


def test_model_states_take_16_to_18_bytes_per_parameter_without_sharding() -> None:
    model = MODELS["llama-3-8b"]
    needed = memory(model, Layout(dp=1, sharding=Sharding.DDP), length=1, micro_batches=1)
    states = needed.weights + needed.gradients + needed.optimizer
    assert states == pytest.approx(18 * model.parameters, rel=1e-3)


def test_fsdp_divides_model_states_by_the_ranks() -> None:
    model = MODELS["llama-3-70b"]
    needed = memory(model, Layout(dp=512, sharding=Sharding.FSDP), length=1, micro_batches=1)
    gathered = 4 * model.parameters / 80
    assert needed.weights + needed.gradients + needed.optimizer == pytest.approx(
        18 * model.parameters / 512 + gathered, rel=1e-3
    )


def test_activations_of_gpt_are_those_of_the_paper() -> None:
    """34 bytes per token and hidden element without attention scores (arXiv 2205.05198, equation 1)."""
    model = MODELS["gpt-3-175b"]
    assert 2 * layer_activations(model, Recompute.NONE) / model.shape.hidden == pytest.approx(34, rel=0.05)
    assert layer_activations(model, Recompute.FULL) == model.shape.hidden


@pytest.mark.parametrize(
    ("dp", "cp", "micro_batch", "recompute", "published_gib"),
    [
        (8, 1, 2, Recompute.SELECTIVE, 77.0),
        (128, 1, 2, Recompute.SELECTIVE, 62.0),
        (8, 1, 1, Recompute.FULL, 83.9),
        (4, 2, 1, Recompute.FULL, 84.2),
        (2, 4, 1, Recompute.FULL, 84.0),
        (1, 8, 1, Recompute.FULL, 84.5),
    ],
)
def test_memory_of_llama_3_8b_is_near_what_torchtitan_published(
    dp: int, cp: int, micro_batch: int, recompute: Recompute, published_gib: float
) -> None:
    """Tables 1 to 3 of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, with torch.compile."""
    length = 8192 if recompute is Recompute.SELECTIVE else 32_768 * cp
    layout = Layout(dp=dp, cp=cp, micro_batch=micro_batch, recompute=recompute, sharding=Sharding.FSDP)
    needed = memory(MODELS["llama-3-8b"], layout, length=length, micro_batches=1, repeated=0.5)
    assert needed.total / 2**30 == pytest.approx(published_gib, rel=0.07)


def test_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    model = MODELS["llama-3-70b"]
    one = memory(model, Layout(tp=8, pp=1), length=8192, micro_batches=8).activations
    eight = memory(model, Layout(tp=8, pp=8), length=8192, micro_batches=8).activations
    assert eight == pytest.approx(one)
    chunks = replace(Layout(tp=8, pp=8), interleave=5)
    assert memory(model, chunks, length=8192, micro_batches=80).activations == pytest.approx(
        one * (1 + 7 / 40), rel=5e-3
    )
