"""Spikes of a series: what is one, what is none, and how often noise is taken for one."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from holdfast.metrics.spikes import FACTOR, WARM_UP, WINDOW, Spike, SpikeDetector


def spikes(values: Iterable[float]) -> list[tuple[int, Spike]]:
    """The spikes of a series, each with its index."""
    detector = SpikeDetector()
    found = ((index, detector.add(value)) for index, value in enumerate(values))
    return [(index, spike) for index, spike in found if spike is not None]


def test_value_far_above_the_running_median_is_a_spike_once() -> None:
    calm = [1.0, 1.1] * WARM_UP
    ((index, spike),) = spikes([*calm, 9.0, 9.0, 9.0, 1.0, 1.0])
    assert (index, spike.value, spike.median) == (len(calm), 9.0, 1.1)
    assert [index for index, _ in spikes([*calm, 9.0, *calm, 30.0])] == [len(calm), 2 * len(calm) + 1]


@pytest.mark.parametrize(
    "values",
    [
        [10.0 / (1 + step) for step in range(200)],
        [1.0] * WARM_UP + [FACTOR - 0.1] * 5,
        [*([1.0] * 9 + [4.0]) * 10, 7.0],
        [1.0] * (WARM_UP - 1) + [100.0],
        [1.0] * WARM_UP + [100.0] + [100.0] * WINDOW,
        [0.0] * 200,
        [-5.0, -4.0] * 100,
    ],
    ids=["it falls", "too little", "less than twice its highest", "too soon", "it stays", "zeros", "negative"],
)
def test_series_without_a_new_spike(values: list[float]) -> None:
    later = [index for index, _ in spikes(values) if index != values.index(max(values))]
    assert later == []


def test_spike_of_a_series_around_zero_is_one_too() -> None:
    assert [index for index, _ in spikes([*([0.5, -0.5, 0.4] * 20), 50.0])] == [60]


@pytest.mark.slow
@pytest.mark.parametrize(("deviation", "most"), [(0.3, 0), (1.0, 20)])
def test_noise_is_rarely_taken_for_a_spike(deviation: float, most: int) -> None:
    noise = random.Random(0)
    assert len(spikes(noise.lognormvariate(0.0, deviation) for _ in range(1_000_000))) <= most


def test_spike_in_noise_is_found() -> None:
    for seed in range(50):
        noise = random.Random(seed)
        values = [noise.lognormvariate(0.0, 0.3) for _ in range(500)]
        values[400] = 20.0
        assert [index for index, _ in spikes(values)] == [400]
