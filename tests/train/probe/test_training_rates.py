"""Rates of the parts of a training step on this machine's CPU."""

from __future__ import annotations

import pytest
import torch

from holdfast.train.probe.training_rates import WIDTHS, training_rates


@pytest.mark.slow
def test_every_part_is_measured_also_without_gradients() -> None:
    with torch.no_grad():
        rates = training_rates(0.0)
    assert [each.width for each in rates.products] == list(WIDTHS)
    assert all(0 < each.tflop_s < 100 for each in rates.products)
    assert 0 < rates.attention_tflop_s < 100
    assert 0 < rates.elementwise_gb_s < 10_000
    assert 0 < rates.adamw_s < 1e-3
    assert 0 < rates.operation_s < 1
