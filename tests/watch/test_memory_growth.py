"""Memory that grows until none is left is named; what reaches a level is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from holdfast.watch.memory_growth import Growth, MemoryGrowthDetector

GIB = 2.0**30
LIMIT = 64 * GIB


def watch(used: Callable[[float], float], *, seconds: float, every_s: float = 2.0) -> list[tuple[float, Growth]]:
    detector, found = MemoryGrowthDetector(), list[tuple[float, Growth]]()
    for n in range(int(seconds / every_s)):
        now = n * every_s
        growth = detector.add(now, used=used(now), free=max(0.0, LIMIT - used(now)))
        found += [(now, growth)] if growth else []
    return found


def test_leak_is_named_once_before_it_ends_in_out_of_memory() -> None:
    for lasts_s in (100.0, 3_000.0, 86_400.0):
        chance = random.Random(int(lasts_s))

        def used(at: float, lasts_s: float = lasts_s, chance: random.Random = chance) -> float:
            return 4 * GIB + (LIMIT - 4 * GIB) * at / lasts_s + chance.random() * 0.01 * GIB

        ((at, growth),) = watch(used, seconds=lasts_s, every_s=max(2.0, lasts_s / 20_000))
        left_s = lasts_s - at
        assert at < 0.97 * lasts_s
        assert abs(growth.left_s - left_s) < 0.2 * left_s + 10.0


@pytest.mark.slow
def test_memory_that_reaches_a_level_is_never_named() -> None:
    for seed in range(100):
        chance = random.Random(seed)
        size, tau, period = chance.uniform(0.05, 0.9), chance.uniform(5.0, 2_000.0), chance.uniform(10.0, 300.0)
        walk = [4 * GIB]
        for _ in range(3000):
            walk.append(min(60 * GIB, max(GIB, walk[-1] + chance.gauss(0.0, 0.05 * GIB))))
        ramp = min(size, 0.24)
        shapes: dict[str, Callable[[float], float]] = {
            "saturating": lambda at, size=size, tau=tau: GIB * (4 + 60 * size * (1 - math.exp(-at / tau))),
            "ramp": lambda at, ramp=ramp, tau=tau: GIB * (4 + 60 * min(ramp, ramp * at / tau)),
            "cycle": lambda at, ramp=ramp, period=period: GIB * (4 + 60 * ramp * (at % period) / period),
            "walk": lambda at, walk=walk: walk[int(at / 2)],
        }
        for name, used in shapes.items():
            assert watch(used, seconds=2000.0, every_s=5.0 if seed % 2 else 2.0) == [], (name, seed)
