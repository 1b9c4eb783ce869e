"""Shuffled order of a dataset's items in an epoch, computed for any index and never stored.

A Feistel network over pairs of digits (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, their
generalised-Feistel construction) is a permutation for any round function; values outside the range are permuted again
until they are inside. The arithmetic below defines it on every machine and for every version of numpy. Changing it
would change the order of runs in progress: checkpoints store `VERSION`.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

VERSION = 1
ROUNDS = 8
"""From six rounds on, neighbours are practically independent even in datasets of a handful of items (tests check)."""

MIN_BASE = 8
"""Of the digits: with smaller digits, round functions take too few forms to make all orders of a few items likely."""

Numbers = NDArray[np.uint64]


class IndexShuffle:
    """An order of `length` items for each epoch, the same for the same seed."""

    def __init__(self, length: int, *, seed: int, shuffle: bool = True) -> None:
        self.length = length
        self._seed = np.array([seed % 2**64], dtype=np.uint64)
        self.shuffled = shuffle
        self._base = np.uint64(max(MIN_BASE, isqrt(length - 1) + 1))
        """Two digits of this base cover `length` and little more, so a value is rarely outside."""

    def item_indices(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Item index of each sample: samples count from 0 over all epochs, items from 0 to `length`."""
        epochs, places = np.divmod(samples.astype(np.uint64), np.uint64(self.length))
        if self.shuffled:
            places = self._permute(places, _splitmix64(_splitmix64(self._seed) ^ epochs))
        return places.astype(np.int64)

    def _permute(self, places: Numbers, keys: Numbers) -> Numbers:
        places = self._feistel_rounds(places, keys)
        outside = np.flatnonzero(places >= self.length)
        while outside.size:
            places[outside] = self._feistel_rounds(places[outside], keys[outside])
            outside = outside[places[outside] >= self.length]
        return places

    def _feistel_rounds(self, places: Numbers, keys: Numbers) -> Numbers:
        left, right = np.divmod(places, self._base)
        for number in range(ROUNDS):
            left, right = right, (left + _splitmix64(right + keys + np.uint64(number << 56)) % self._base) % self._base
        return left * self._base + right


def _splitmix64(values: Numbers) -> Numbers:
    """Make every bit depend on every bit: the finaliser of SplitMix64 (Steele and others, 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
