from __future__ import annotations

from itertools import pairwise

import pytest

from holdfast.failure_rates import DAY_S, DEFAULT_RATE, FailureHistory, mtbf_s, young_interval_s
from holdfast.train.checkpoint.interval import YoungInterval


def past(nodes: int = 1, failures: int = 0, node_days: float = 0.0) -> FailureHistory:
    return FailureHistory(nodes=nodes, failures=failures, node_s=node_days * DAY_S)


def test_interval_is_youngs():
    # 1,000 nodes of RSC-1 fail 6.5 times a day; at 2 s a save: sqrt(2 * 2 s * 86,400 s / 6.5).
    assert DEFAULT_RATE.per_1000_node_days == 6.5
    assert young_interval_s(past(nodes=1000), cost_s=2.0, took_s=1.0) == pytest.approx(230.58, abs=0.01)


def test_interval_is_never_shorter_than_a_save():
    assert young_interval_s(past(nodes=1000), cost_s=0.0001, took_s=30.0) == 30.0


def test_more_nodes_more_failures_and_cheaper_saves_make_it_shorter():
    lengths = [
        young_interval_s(past(), cost_s=1.0, took_s=0.0),
        young_interval_s(past(nodes=10), cost_s=1.0, took_s=0.0),
        young_interval_s(past(nodes=10, failures=3, node_days=1.0), cost_s=1.0, took_s=0.0),
        young_interval_s(past(nodes=10, failures=3, node_days=1.0), cost_s=0.5, took_s=0.0),
    ]
    assert all(longer > shorter for longer, shorter in pairwise(lengths))


def test_rate_of_a_long_run_is_its_own():
    assert mtbf_s(past(failures=1000, node_days=10_000)) == pytest.approx(10 * DAY_S, rel=0.02)


def test_choice_is_said_once_and_again_when_it_changes():
    auto = YoungInterval(nodes=8, failures=0, clock=lambda: 0.0)
    auto.restore_node_s(DAY_S)
    auto.add_stall(1.0)
    first = auto.on_saved(took_s=2.0)
    assert first is not None
    assert first.code == "checkpoint-interval"
    assert f"every {auto.every_s:.1f} s" in first.what
    auto.add_stall(1.1)
    assert auto.on_saved(took_s=2.0) is None
    auto.add_stall(4.0)
    assert auto.on_saved(took_s=2.0) is not None
