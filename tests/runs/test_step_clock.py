"""Torch programs that know nothing of holdfast: their steps are counted, and their hangs found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runs.conftest import STEP_CLOCK, Runs

from holdfast import api
from holdfast.events import Outcome, RankHung, RecoveryDecided, StepCommitted

TRAINER = str(Path(__file__).parents[1] / "programs" / "step_clock_trainer.py")


@pytest.mark.parametrize("pause", ["stop", "collective"])
def test_hang_of_an_unmodified_program_restarts_its_ranks(runs: Runs, pause: str) -> None:
    watched = runs.start(sys.executable, TRAINER, "30", pause, "25", overrides=STEP_CLOCK)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    (recovery,) = watched.all(RecoveryDecided)
    assert recovery.finding.code == "rank-hung"
    assert {hung.rank for hung in watched.all(RankHung)} == {0, 1}
    assert not any(hung.has_session for hung in watched.all(RankHung))
    account = api.summary(watched.folder).account
    assert account.steps == 30  # of the last attempt
    assert account.ettr is not None
    assert account.most_ettr is not None
    assert account.ettr < account.most_ettr


def test_evaluation_of_one_rank_is_no_hang(runs: Runs) -> None:
    watched = runs.start(sys.executable, TRAINER, "30", "evaluation", "20", overrides=STEP_CLOCK)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.all(RecoveryDecided) == []
    assert watched.all(StepCommitted)[-1].step == 30


def test_switched_off_clock_leaves_no_trace(runs: Runs) -> None:
    watched = runs.start(
        sys.executable, TRAINER, "3", "none", overrides=("watch.step_clock=false", "env.PYTHONPATH=elsewhere")
    )
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.all(StepCommitted) == []
    assert "done elsewhere\n" in watched.log(0)


def test_ranks_of_torchrun_have_clocks_of_their_own(runs: Runs) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    watched = runs.start(
        torchrun, TRAINER, "12", "none", nodes=1, overrides=(*STEP_CLOCK, "launch=per-node", "ranks_per_node=2")
    )
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    steps = watched.all(StepCommitted)
    assert (steps[0].first, steps[-1].step) == (1, 12)
    assert all(step.step_clock for step in steps)
