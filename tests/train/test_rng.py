"""States of the random generators are recorded in their own format, and restored."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import numpy.random
import pytest
import torch

from holdfast.train.checkpoint import mt19937, rng


@pytest.fixture(autouse=True)
def _others_draw_as_if_nothing_had_been() -> Iterator[None]:
    was = random.getstate(), numpy.random.get_state(legacy=False), torch.get_rng_state()
    yield
    random.setstate(was[0])
    numpy.random.set_state(was[1])
    torch.set_rng_state(was[2])


def drawn() -> list[object]:
    """Numbers of each kind; a normal one leaves a second behind, and what python makes of bits may too."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(5),
        numpy.random.random(),
        float(numpy.random.standard_normal()),
        int(numpy.random.randint(7)),
        torch.rand(3).tolist(),
    ]


def seed_all() -> None:
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)


def draw_a_normal_number() -> None:
    random.gauss(0, 1)
    numpy.random.standard_normal()


def draw_two_normal_numbers() -> None:
    draw_a_normal_number()
    draw_a_normal_number()


def use_up_the_words() -> None:
    for _ in range(312):
        random.random()
        numpy.random.random()


def go_back() -> None:
    was = random.getstate(), numpy.random.get_state()
    draw_a_normal_number()
    random.setstate(was[0])
    numpy.random.set_state(was[1])


MOMENTS = (seed_all, drawn, draw_a_normal_number, draw_two_normal_numbers, use_up_the_words, go_back)


def plain(state: Any) -> Any:
    """The state with what numpy has of arrays in bytes, so that it can be compared."""
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    return (state.dtype.str, state.tobytes()) if isinstance(state, numpy.ndarray) else state


@pytest.mark.parametrize("moment", MOMENTS)
def test_state_that_was_noted_is_what_the_generators_say(moment: Callable[[], object]):
    seed_all()
    moment()
    noted = rng.capture()
    said = random.getstate(), plain(numpy.random.get_state(legacy=False)), torch.get_rng_state().tolist()
    drawn()  # what was noted stays as it was
    state = noted()
    assert (state["python"], plain(state["numpy"]), state["torch"].tolist()) == said


@pytest.mark.parametrize("moment", MOMENTS)
def test_generators_that_are_put_back_draw_the_same_again(moment: Callable[[], object]):
    moment()
    noted = rng.capture()
    once = drawn()
    rng.restore(noted())
    assert drawn() == once


def test_memory_of_this_python_and_this_numpy_is_read():
    assert mt19937.python_capture() is not None
    assert mt19937.numpy_capture(numpy.random) is not None


def test_another_generator_of_numpys_is_asked():
    before = numpy.random.get_bit_generator()
    numpy.random.seed(0)  # a cached normal number would not survive the other generator
    noted_before = rng.capture()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        state = rng.capture()()["numpy"]
        assert plain(state) == plain(numpy.random.get_state(legacy=False))
        assert mt19937.numpy_capture(numpy.random) is None
    finally:
        numpy.random.set_bit_generator(before)
    assert plain(noted_before()["numpy"]) == plain(numpy.random.get_state(legacy=False))


def test_generator_of_python_that_is_another_is_asked(monkeypatch: pytest.MonkeyPatch):
    class Own(random.Random):
        pass

    monkeypatch.setattr(random, "_inst", Own(1))
    assert mt19937.python_capture() is None


def test_memory_that_says_something_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(random, "getstate", random.Random(1).getstate)
    monkeypatch.setattr(mt19937, "_pair_at", lambda _: 0)
    assert mt19937.python_capture() is None
    assert mt19937.numpy_capture(numpy.random) is None


def test_numpys_are_left_out_where_nobody_has_imported_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "numpy.random")
    assert rng.capture()()["numpy"] is None


class Gpus:
    """Several GPUs, of which one is the rank's own."""

    def __init__(self, *states: int, current: int = 0) -> None:
        self.states = [torch.tensor([each]) for each in states]
        self.current = current

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.states)

    def current_device(self) -> int:
        return self.current

    def get_rng_state(self, device: int) -> torch.Tensor:
        return self.states[device].clone()

    def set_rng_state(self, new_state: torch.Tensor, device: int) -> None:
        self.states[device] = new_state


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (Gpus(0, 0, 0, current=1), [10, 11, 12]),
        (Gpus(0, current=0), [11]),
        (Gpus(0, 0, 0, 0, current=3), [10, 12, 0, 11]),
    ],
    ids=["the same", "the rank's own alone", "more, and others"],
)
def test_every_gpu_gets_its_generator_back_and_the_ranks_own_goes_to_its_own(later: Gpus, expected: list[int]):
    state = rng.capture(Gpus(10, 11, 12, current=1))()
    rng.restore(state, later)
    assert [each.item() for each in later.states] == expected


def test_machine_without_gpus_restores_the_rest():
    rng.restore(rng.capture(Gpus(1))() | {"cuda": [torch.tensor([1])]}, Gpus())
    assert rng.capture()()["cuda"] == []
