"""The mini model gives the same weights each time, and other weights if one bit is wrong once."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from random import Random

import pytest
import torch

from holdfast.events.probe_results import MiniModelAnswer
from holdfast.train.ft.bit_flip import flip_bit
from holdfast.train.probe import mini_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mini_model.WIDTHS, "cpu", 16)


def test_answer_is_the_same_each_time_whatever_the_generators_and_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    first = mini_model.answer(CPU)
    torch.manual_seed(7)
    torch.set_num_threads(2)
    try:
        assert mini_model.answer(CPU) == first
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert first.contradictions == 0
    assert "torch" in first.arithmetic


def test_bit_that_is_wrong_once_contradicts_and_one_that_is_wrong_each_time_gives_another_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, gelu = mini_model.answer(CPU), torch.nn.functional.gelu

    def wrong_in(calls: Collection[int]) -> MiniModelAnswer:
        """The answer of a device of which these calls, by number, give a wrong bit."""
        numbers = itertools.count()

        def flipping(x: torch.Tensor) -> torch.Tensor:
            result = gelu(x).clone()
            if next(numbers) in calls:
                flip_bit(result.detach(), Random(0))
            return result

        monkeypatch.setattr(torch.nn.functional, "gelu", flipping)
        return mini_model.answer(CPU)

    assert wrong_in({2}).contradictions == mini_model.ROUNDS - 1
    always = wrong_in(range(10**6))
    assert (always.contradictions, always.arithmetic) == (0, right.arithmetic)
    assert always.digest != right.digest
