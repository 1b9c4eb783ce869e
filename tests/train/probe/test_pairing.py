"""Pair rounds and the location of a slow or silent node, without torch."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.events.probe_results import Located, PairRate
from holdfast.train.probe.pairing import Gates, below_median, disjoint, locate, pair_rounds

GATES = Gates()
GOOD_GB_S = 40.0


def measured(count: int, rate_of, seed: int, noise: float = 0.2) -> list[PairRate]:
    """Every pair of all rounds, with noise."""
    dice = random.Random(seed)
    return [
        PairRate(nodes=pair, gb_s=None if rate_of(pair) is None else rate_of(pair) * dice.uniform(1 - noise, 1 + noise))
        for round_ in pair_rounds(count)
        for pair in round_
    ]


@pytest.mark.parametrize("count", range(66))
def test_rounds_are_disjoint_and_no_two_nodes_meet_twice(count: int) -> None:
    rounds = pair_rounds(count)
    for round_ in rounds:
        nodes = [node for pair in round_ for node in pair]
        assert len(nodes) == len(set(nodes)) == count - count % 2
        assert set(nodes) <= set(range(count))
    pairs = [pair for round_ in rounds for pair in round_]
    assert len(pairs) == len(set(pairs))
    assert all(low < high for low, high in pairs)
    if count > 1:
        assert len(rounds) <= math.ceil(math.log2(count)) + 1
        met = {node: sum(node in pair for pair in pairs) for node in range(count)}
        assert min(met.values()) >= min(2, count - 1)


def test_rounds_of_eight_nodes_are_four() -> None:
    assert len(pair_rounds(8)) == 4


def test_disjoint_keeps_the_first_pairs() -> None:
    assert disjoint([(0, 1), (1, 2), (2, 3), (0, 4)]) == ((0, 1), (2, 3))


@settings(max_examples=40)
@given(st.integers(3, 64), st.data())
def test_one_slow_or_silent_node_is_located(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))
    rate = data.draw(st.sampled_from([None, 0.0, 0.1 * GOOD_GB_S, 0.35 * GOOD_GB_S]))
    results = measured(count, lambda pair: rate if bad in pair else GOOD_GB_S, data.draw(st.integers()))
    assert locate(results, GATES) == Located(nodes=(bad,))


def test_one_silent_node_of_two_is_located_to_the_pair() -> None:
    assert locate([PairRate(nodes=(0, 1))], GATES) == Located(pairs=((0, 1),))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(2, 64), st.integers(), st.integers(1, 8))
def test_no_node_is_named_in_clean_noisy_measurements(count: int, seed: int, lanes: int) -> None:
    results = [
        PairRate(nodes=each.nodes, lane=lane, gb_s=each.gb_s)
        for lane in range(lanes)
        for each in measured(count, lambda _: GOOD_GB_S, seed + lane)
    ]
    assert locate(results, GATES) == Located()


@settings(max_examples=40)
@given(st.integers(4, 64), st.data())
def test_one_slow_link_is_named_and_neither_of_its_nodes(count: int, data: st.DataObject) -> None:
    pairs = [pair for round_ in pair_rounds(count) for pair in round_]
    slow = data.draw(st.sampled_from(pairs))
    results = measured(count, lambda pair: 0.2 * GOOD_GB_S if pair == slow else GOOD_GB_S, data.draw(st.integers()))
    assert locate(results, GATES) == Located(pairs=(slow,))


@settings(max_examples=40)
@given(st.integers(8, 64), st.data())
def test_two_silent_nodes_are_both_located(count: int, data: st.DataObject) -> None:
    silent = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=2))
    results = measured(count, lambda pair: None if silent & set(pair) else GOOD_GB_S, data.draw(st.integers()))
    assert locate(results, GATES) == Located(nodes=tuple(sorted(silent)))


def test_absent_node_explains_its_only_pair() -> None:
    results = [PairRate(nodes=(0, 3)), PairRate(nodes=(1, 2), gb_s=40.0), PairRate(nodes=(0, 1), gb_s=39.0)]
    assert locate(results, GATES, absent={3}) == Located(nodes=(3,))


def test_one_slow_lane_makes_a_pair_slow() -> None:
    results = [
        PairRate(nodes=pair, lane=lane, gb_s=4.0 if 2 in pair and lane == 1 else 40.0)
        for round_ in pair_rounds(4)
        for pair in round_
        for lane in range(2)
    ]
    assert locate(results, GATES) == Located(nodes=(2,))


@pytest.mark.parametrize("rate", [None, 1.0])
def test_fabric_that_is_slow_or_silent_as_a_whole_names_no_node(rate: float | None) -> None:
    results = measured(8, lambda _: rate, 0)
    assert locate(results, Gates(least_gb_s=10.0)) == Located(none_good=True)


def test_absolute_gate_finds_what_is_slow_in_a_pair_without_others() -> None:
    result = PairRate(nodes=(0, 1), gb_s=1.0)
    assert locate([result], GATES) == Located()
    assert locate([result], Gates(least_gb_s=10.0)) == Located(pairs=((0, 1),))


def test_median_is_that_of_the_others() -> None:
    assert below_median({"a": 0.5, "b": 1.0}, 0.6) == {"a"}
    assert below_median({"a": 0.5, "b": 0.5, "c": 1.0}, 0.6) == {"a", "b"}
    assert below_median({"a": 0.7, "b": 1.0, "c": 1.0}, 0.6) == set()
    assert below_median({"a": 0.1}, 0.6) == set()
