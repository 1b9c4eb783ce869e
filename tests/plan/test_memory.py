"""Memory of layouts beside what papers state, and the arithmetic that reviewers do by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bench import plan_memory
from holdfast.plan.hardware import MACHINES
from holdfast.plan.layout import Layout, Recompute, Sharding
from holdfast.plan.memory import ProgramMemory, layer_activations, memory
from holdfast.plan.model_catalog import MODELS
from holdfast.plan.traffic import ddp_bytes

CASES = [
    each
    for each in plan_memory.cases()
    if each.layout.gpus in {1, 2, 4} and (each.layout.tp == 2 or each.layout.recompute is not Recompute.FULL)
]
"""A part of the cases, for time."""
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
    needed = memory(model, Layout(dp=1, sharding=Sharding.DDP), ProgramMemory(), length=1, micro_batches=1)
    states = needed.weights + needed.gradients + needed.optimizer
    assert states == pytest.approx(18 * model.parameters, rel=1e-3)


def test_fsdp_divides_model_states_by_the_ranks() -> None:
    model = MODELS["llama-3-70b"]
    needed = memory(model, Layout(dp=512, sharding=Sharding.FSDP), ProgramMemory(), length=1, micro_batches=1)
    ends = 2 * model.embedding_weights
    gathered = 2 * (ends + (model.parameters - ends) / 80)
    assert needed.weights + needed.gradients + needed.optimizer == pytest.approx(
        16 * model.parameters / 512 + gathered, rel=1e-3
    )


def test_activations_of_gpt_are_those_of_the_paper() -> None:
    """34 bytes per token and hidden element without attention scores (arXiv 2205.05198, equation 1)."""
    model = MODELS["gpt-3-175b"]
    assert 2 * layer_activations(model, Recompute.NONE, ProgramMemory()) / model.shape.hidden == pytest.approx(
        34, rel=0.05
    )
    assert layer_activations(model, Recompute.FULL, ProgramMemory()) == model.shape.hidden


@pytest.mark.parametrize(("name", "ours_gib", "published_gib"), [*plan_memory.published()])
def test_memory_is_what_torchtitan_published(name: str, ours_gib: float, published_gib: float) -> None:
    assert ours_gib == pytest.approx(published_gib, rel=0.05), name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory_is_what_pytorchs_tensors_take(case: plan_memory.Case) -> None:
    assert plan_memory.predicted(case) == pytest.approx(plan_memory.measured(case), rel=0.05)


def test_compiled_programs_keep_less_than_eager_ones() -> None:
    model = MODELS["llama-3-8b"]
    eager, compiled = (
        layer_activations(model, Recompute.NONE, each) for each in (plan_memory.EAGER, plan_memory.COMPILED)
    )
    assert eager - compiled == 6 * model.shape.hidden + model.shape.intermediate


def test_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    model = MODELS["llama-3-70b"]
    head = 2 * 8192 * model.shape.hidden * (1 / 8 + 1)  # only the last stage has it
    one = memory(model, Layout(tp=8, pp=1), ProgramMemory(), length=8192, micro_batches=8).activations - head
    eight = memory(model, Layout(tp=8, pp=8), ProgramMemory(), length=8192, micro_batches=8).activations
    assert eight == pytest.approx(one)
    chunks = replace(Layout(tp=8, pp=8), interleave=5)
    assert memory(model, chunks, ProgramMemory(), length=8192, micro_batches=80).activations == pytest.approx(
        one * (1 + 7 / 40), rel=5e-3
    )
