from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.metrics.flops import FlopsPerToken, model_shape
from holdfast.train.metrics.step_meter import StepMeter, to_numbers


def llama() -> Any:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=0,
        )
    )


class InWrapper(torch.nn.Module):
    """As DDP holds what it wraps."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def rates(meter: StepMeter, **given: float) -> dict[str, float]:
    return meter.measure({"tokens": 64.0, "global_batch": 4.0, **given}, step_s=0.5, devices=2)


def expected(length: int) -> float:
    known = model_shape(llama().config.to_dict())
    needs = known and known.per_token(length)
    assert needs is not None
    return 64 / 0.5 / 2 * needs.full / 1e12


@pytest.mark.slow
def test_model_with_a_config_is_measured_by_it_whatever_it_is_wrapped_in():
    model = llama()
    for wrapped in (model, torch.nn.DataParallel(model), torch.compile(model), InWrapper(torch.compile(model))):
        assert rates(StepMeter(wrapped))["tflops_full"] == pytest.approx(expected(16))


def test_length_that_is_given_goes_before_that_of_the_samples():
    assert rates(StepMeter(llama(), sequence_length=8))["tflops_full"] == pytest.approx(expected(8))


def test_flops_that_are_given_go_before_those_of_the_config():
    for given in (2e9, FlopsPerToken(full=2e9, causal=1e9)):
        measured = rates(StepMeter(llama(), flops_per_token=given))
        assert measured["tflops_full"] == pytest.approx(0.128)
        assert measured.get("tflops_causal") == (0.064 if isinstance(given, FlopsPerToken) else None)


def test_nothing_is_claimed_of_a_model_without_config_or_one_that_is_trained_in_part():
    frozen = llama()
    frozen.model.embed_tokens.requires_grad_(False)
    for model in (torch.nn.Linear(2, 2), frozen, None):
        assert not [name for name in rates(StepMeter(model)) if name.startswith(("mfu", "tflops"))]


def test_mfu_is_not_claimed_of_a_cpu():
    assert not [name for name in rates(StepMeter(llama())) if name.startswith("mfu")]


def test_waiting_counts_the_time_until_items_are_there_and_no_other():
    now = [0.0]

    def slow() -> Iterator[int]:
        for item in range(3):
            now[0] += 0.25
            yield item
        now[0] += 0.5

    meter = StepMeter(clock=lambda: now[0])
    assert "data_wait_s" not in rates(meter)
    items = []
    for item in meter.timed(slow()):
        items.append(item)
        now[0] += 10.0
    assert items == [0, 1, 2]
    assert rates(meter)["data_wait_s"] == 1.25
    assert rates(meter)["data_wait_s"] == 0.0


def test_numbers_are_plain_and_none_is_left_out():
    given = {"loss": torch.tensor(2.5, requires_grad=True), "tokens": 3, "norm": None}
    assert to_numbers(given) == ({"loss": 2.5, "tokens": 3.0}, {}, None)


def test_metrics_that_are_no_numbers_are_dropped_one_by_one():
    bad = {
        "phase": "warm-up",
        "norms": torch.ones(3),
        "loss_vector": np.ones(3),
        "roots": torch.ones((), dtype=torch.complex64),
        "huge": 10**400,
        "n" * 129: 1.0,
        "torn\ud800": 1.0,
    }
    good, dropped, _ = to_numbers(bad | {"loss": 1.0})
    assert good == {"loss": 1.0}
    assert dropped.keys() == bad.keys()
    assert "3 elements" in dropped["norms"]
