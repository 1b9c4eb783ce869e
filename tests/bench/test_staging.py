"""The comparison of staging, which the bench on a GPU calls as well, runs on a CPU."""

from __future__ import annotations

import pytest
import torch
from bench.paired_stats import OURS, PEER, PEER_AGAIN

from bench import staging


def test_both_sides_are_measured_in_every_round(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(staging, "WIDTH", 32)
    found = staging.measure(torch.device("cpu"), layers=1, rounds=2)
    assert {name: len(each) for name, each in found.items()} == {PEER: 2, OURS: 2, PEER_AGAIN: 2}
    assert all(one.stall_s > 0 and one.complete_s > 0 for each in found.values() for one in each)
    assert "stall, holdfast / DefaultStager" in capsys.readouterr().out
