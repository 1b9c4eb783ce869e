from __future__ import annotations

from collections import Counter
from itertools import permutations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from holdfast.train.data.index_shuffle import IndexShuffle


def epoch(order: IndexShuffle, number: int) -> list[int]:
    return order.item_indices(np.arange(number * order.length, (number + 1) * order.length)).tolist()


@pytest.mark.slow
@settings(deadline=None)
@given(length=st.integers(1, 3000), seed=st.integers(-(2**63), 2**70), number=st.integers(0, 2**31))
def test_every_epoch_takes_every_item_once(length: int, seed: int, number: int):
    assert sorted(epoch(IndexShuffle(length, seed=seed), number)) == list(range(length))


@pytest.mark.slow
@settings(deadline=None)
@given(length=st.integers(1, 2**40), seed=st.integers(0, 2**32), samples=st.lists(st.integers(0, 2**62), max_size=50))
def test_item_depends_on_its_sample_alone(length: int, seed: int, samples: list[int]):
    together = IndexShuffle(length, seed=seed).item_indices(np.array(samples, dtype=np.int64)).tolist()
    assert together == [IndexShuffle(length, seed=seed).item_indices(np.array([sample]))[0] for sample in samples]
    assert all(0 <= item < length for item in together)


def test_order_is_that_of_version_1():
    assert epoch(IndexShuffle(10, seed=0), 0) == [4, 6, 9, 0, 3, 2, 1, 5, 7, 8]
    assert IndexShuffle(10**12, seed=7).item_indices(np.array([0, 10**12 - 1, 10**12])).tolist() == [
        727314807729,
        800833857878,
        649296595896,
    ]


def test_unshuffled_items_come_as_they_are():
    assert epoch(IndexShuffle(5, seed=1, shuffle=False), 3) == [0, 1, 2, 3, 4]


def test_all_orders_of_five_items_are_about_as_likely():
    seen = Counter(map(tuple, IndexShuffle(5, seed=7).item_indices(np.arange(5 * 6000)).reshape(-1, 5).tolist()))
    expected = 6000 / 120
    chi_squared = sum((seen[each] - expected) ** 2 / expected for each in permutations(range(5)))
    assert chi_squared < 119 + 5 * (2 * 119) ** 0.5


def test_neighbours_in_a_large_dataset_come_from_all_over_it():
    length = 10**9
    items = IndexShuffle(length, seed=3).item_indices(np.arange(100_000))
    tenths = np.bincount(items // (length // 10), minlength=10)
    assert abs(tenths - 10_000).max() < 500
    assert abs(np.corrcoef(items[:-1], items[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(items, IndexShuffle(length, seed=4).item_indices(np.arange(100_000)))[0, 1]) < 0.02
    assert (
        abs(np.corrcoef(items, IndexShuffle(length, seed=3).item_indices(np.arange(length, length + 100_000)))[0, 1])
        < 0.02
    )
