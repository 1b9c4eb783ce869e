"""Faults of a rank's numbers: they hit one step, and only what they are to hit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.train.test_gradient_guard import Loop
from torch import nn

from holdfast.events import FaultTarget
from holdfast.protocol.rank_messages import InjectRankFault, RankFault
from holdfast.train.ft.rank_faults import InjectedFaultError, RankFaults

LOSS, GRADIENT = FaultTarget.LOSS.value, FaultTarget.GRADIENT.value


def drill(fault: RankFault, target: str, amount: float | None = None) -> InjectRankFault:
    return InjectRankFault(fault=fault, target=target, amount=amount)


def gradients(loop: Loop) -> list[float]:
    """The largest gradient of each trained parameter, after a backward pass."""
    loop.optimizer.zero_grad()
    loop.backward()
    trained = (parameter for parameter in loop.model.parameters() if parameter.requires_grad)
    return [float(parameter.grad.abs().max()) for parameter in trained if parameter.grad is not None]


def test_gradient_of_the_last_parameter_alone_is_hit_for_one_step() -> None:
    loop = Loop()
    before = gradients(loop)
    RankFaults(loop.model, loop.optimizer).inject(drill(RankFault.NAN, GRADIENT))
    *others, last = gradients(loop)
    assert (others, math.isnan(last)) == (before[:-1], True)
    assert gradients(loop) == before


def test_spike_multiplies_by_its_amount() -> None:
    loop = Loop()
    before = gradients(loop)
    faults = RankFaults(loop.model, loop.optimizer)
    faults.inject(drill(RankFault.SPIKE, GRADIENT, 1000.0))
    assert gradients(loop) == pytest.approx([*before[:-1], 1000.0 * before[-1]])
    faults.inject(drill(RankFault.SPIKE, LOSS, 1000.0))
    assert gradients(loop) == pytest.approx([1000.0 * each for each in before])
    assert gradients(loop) == before


class Answers(nn.Module):
    """A model whose output has a structure."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.answer = answer

    def forward(self) -> Any:
        return self.answer


def test_every_number_of_a_models_output_is_hit_and_nothing_else() -> None:
    whole = torch.tensor([3])
    given = {"logits": torch.ones(2), "parts": [torch.ones(1), (torch.ones(1), "a name")], "ids": whole, "none": None}
    model = Answers(given)
    RankFaults(model, torch.optim.SGD(model.parameters())).inject(drill(RankFault.NAN, LOSS))
    output = model()
    assert output is given
    assert bool(output["logits"].isnan().all())
    assert bool(output["parts"][0].isnan().all())
    assert bool(output["parts"][1][0].isnan().all())
    assert (output["parts"][1][1], output["ids"], output["none"]) == ("a name", whole, None)
    clean = Answers(torch.ones(2))
    assert not bool(clean().isnan().any())


def test_rank_without_a_model_of_its_session_has_no_numbers_to_damage() -> None:
    RankFaults().inject(drill(RankFault.NAN, LOSS))


def test_error_is_raised_in_the_loop() -> None:
    with pytest.raises(InjectedFaultError):
        RankFaults().inject(drill(RankFault.RAISE, "rank"))
