"""How the bench of predictions on CPUs counts its rounds."""

from __future__ import annotations

import pytest
from bench.plan_cpu import error, floor


def test_error_compares_medians_so_that_one_disturbed_round_does_not_count() -> None:
    assert error([1.0, 1.1, 9.0], [1.0, 1.0, 1.0]) == pytest.approx(0.1)


def test_noise_floor_is_what_successive_rounds_differ_by() -> None:
    assert floor([1.0, 1.1, 1.1]) == pytest.approx(0.05)
    assert floor([1.0]) == 0.0
