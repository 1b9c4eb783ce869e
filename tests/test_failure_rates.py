"""How many standbys there are by themselves."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.failure_rates import DEFAULT_RATE, FAILURE_RATES, binomial_quantile, standby_count

CHANCES = st.floats(1e-6, 0.5)
QUANTILES = st.floats(0.5, 0.999)


def within(trials: int, chance: float, count: int) -> float:
    """The chance that at most so many come true, by the definition."""
    return sum(math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(count + 1))


def test_rates_are_those_that_were_published_each_with_its_source() -> None:
    """Per 1,000 node-days; Llama 3's from its own figures: 419 interruptions, 16,384 GPUs, 8 a node, 54 days."""
    published = {"Llama 3": 3.8, "RSC-1": 6.5, "RSC-2": 2.3, "ByteRobust": 1.2}
    assert {prior.fleet: prior.per_1000_node_days for prior in FAILURE_RATES} == published
    assert published["Llama 3"] == round(1000 * 419 / (16_384 / 8 * 54), 1)
    sources = {prior.fleet: prior.source for prior in FAILURE_RATES}
    assert "Llama 3 Herd" in sources["Llama 3"]
    assert "Kokolis" in sources["RSC-1"]
    assert "Kokolis" in sources["RSC-2"]
    assert "ByteDance" in sources["ByteRobust"]
    assert max(FAILURE_RATES, key=lambda prior: prior.per_1000_node_days) is DEFAULT_RATE


@given(trials=st.integers(1, 60), chance=CHANCES, quantile=QUANTILES)
def test_quantile_is_the_least_number_that_covers_so_many_cases(trials: int, chance: float, quantile: float) -> None:
    least = binomial_quantile(trials, chance, quantile)
    assert 0 <= least <= trials
    assert within(trials, chance, least) >= quantile - 1e-9
    assert least == 0 or within(trials, chance, least - 1) < quantile + 1e-9


@given(trials=st.integers(1, 100_000), chance=st.floats(1e-6, 0.01), quantile=QUANTILES)
def test_more_trials_never_need_fewer(trials: int, chance: float, quantile: float) -> None:
    assert binomial_quantile(trials, chance, quantile) <= binomial_quantile(trials + 1, chance, quantile)


def test_standbys_are_those_the_pages_name() -> None:
    assert [standby_count(nodes) for nodes in (1, 2, 8, 128, 1000)] == [0, 1, 1, 3, 13]
    assert all(fewer <= more for fewer, more in pairwise(map(standby_count, (1, 10, 100, 1000, 10_000, 100_000))))


@pytest.mark.parametrize(("nodes", "count"), [(128, 2), (512, 3), (1024, 4)])
def test_fleet_that_fails_less_needs_fewer(nodes: int, count: int) -> None:
    prior = next(prior for prior in FAILURE_RATES if prior.fleet == "ByteRobust")
    assert binomial_quantile(nodes, prior.per_1000_node_days / 1000, 0.99) == count
