"""A rank that keeps the others waiting is found and named, whether or not it says how far it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runs.conftest import Runs

from holdfast import api
from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.row import Sureness
from holdfast.events import DrillAction, DrillTarget, RankHung, RecoveryDecided, StepCommitted

DREAMER = str(Path(__file__).parents[1] / "programs" / "dreamer.py")
ASTRAY = str(Path(__file__).parents[1] / "programs" / "astray.py")
TRAINED = str(Path(__file__).parents[2] / "bench" / "programs" / "trained.py")
ONCE = ("recovery.max_restarts=0", "env.OMP_NUM_THREADS=1")


@pytest.mark.slow
def test_rank_that_another_gave_up_waiting_for_is_named_with_where_it_stood(runs: Runs) -> None:
    watched = runs.start(sys.executable, DREAMER, "1", "4", overrides=ONCE)
    watched.end()
    (seen,) = watched.all(RankHung)
    assert seen.innermost.startswith("dream (dreamer.py:")
    (decided,) = watched.all(RecoveryDecided)
    assert (decided.finding.code, decided.first_rank) == ("rank-hung", 1)
    answer = api.diagnose_run(watched.folder)
    assert (answer.klass, answer.sure, str(answer.culprit)) == (
        Class.COLLECTIVE_MISMATCH,
        Sureness.CERTAIN,
        "rank 1 on node1",
    )
    assert "rank 1 never entered the collective" in answer.what
    assert answer.evidence[0].where.startswith(seen.stacks)
    assert "dreamer.py:" in answer.evidence[0].text
    assert answer.missing == ()


@pytest.mark.slow
def test_rank_that_sums_where_no_other_does_is_named(runs: Runs) -> None:
    watched = runs.start(sys.executable, ASTRAY, "1", "9", overrides=(*ONCE, "nodes=3", "recovery.step_deadline_s=2"))
    watched.end()
    answer = api.diagnose_run(watched.folder)
    assert (answer.klass, str(answer.culprit)) == (Class.COLLECTIVE_MISMATCH, "rank 1 on node1")
    assert "rank 1 in all_reduce at astray.py:14 in evaluate" in answer.what


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_still_at_the_end_of_its_step_is_blamed_and_not_one_that_waits_for_it(runs: Runs, rank: int) -> None:
    overrides = ("recovery.step_deadline_s=1", "env.OMP_NUM_THREADS=1")
    watched = runs.start(sys.executable, TRAINED, "100000", "0.01", overrides=overrides)
    watched.until(StepCommitted)
    watched.drill(DrillTarget.COLLECTIVE, rank, DrillAction.HANG, at_step=12)
    assert watched.until(RecoveryDecided).first_rank == rank
    lines = {event.rank: event.commit_line for event in watched.all(RankHung)}
    assert lines[rank] > 0
    assert lines[1 - rank] == 0
    api.cancel(watched.folder, force=True)
