"""A rank that keeps the others waiting is found and named, whether or not it reports steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runs.conftest import NCCL_LIKE, Runs

from holdfast import api
from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.events import FaultAction, FaultTarget, RankHung, RecoveryDecided, StepCommitted

SLEEPING_RANK = str(Path(__file__).parents[1] / "programs" / "sleeping_rank.py")
MISMATCHED_GROUP = str(Path(__file__).parents[1] / "programs" / "mismatched_group.py")
DDP_SESSION = str(Path(__file__).parents[2] / "bench" / "programs" / "ddp_session.py")
ONCE = ("recovery.max_restarts=0", "env.OMP_NUM_THREADS=1")


@pytest.mark.slow
def test_rank_that_another_gave_up_waiting_for_is_named_with_where_it_stood(runs: Runs) -> None:
    watched = runs.start(sys.executable, SLEEPING_RANK, "1", "4", overrides=ONCE)
    watched.wait_for_end()
    (seen,) = watched.all(RankHung)
    assert seen.top_frame.startswith("dream (sleeping_rank.py:")
    (decided,) = watched.all(RecoveryDecided)
    assert (decided.finding.code, decided.first_failed_rank) == ("rank-hung", 1)
    answer = api.diagnose_run(watched.folder)
    assert (answer.failure_class, answer.confidence, str(answer.first_failure)) == (
        FailureClass.COLLECTIVE_MISMATCH,
        Confidence.CERTAIN,
        "rank 1 on node1",
    )
    assert "rank 1 never entered the collective" in answer.what
    assert answer.evidence[0].where.startswith(seen.stacks)
    assert "sleeping_rank.py:" in answer.evidence[0].text
    assert answer.next_evidence == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "frame"),
    [((), "mismatched_group.py:18 in evaluate"), ((NCCL_LIKE,), "in Operation.wait")],
    ids=["gloo", "nccl-like"],
)
def test_rank_that_sums_where_no_other_does_is_named(runs: Runs, group: tuple[str, ...], frame: str) -> None:
    watched = runs.start(
        sys.executable, MISMATCHED_GROUP, "1", "9", overrides=(*ONCE, "nodes=3", "recovery.step_timeout_s=2", *group)
    )
    watched.wait_for_end()
    (decided,) = watched.all(RecoveryDecided)
    assert decided.first_failed_rank == 1
    shown = "ranks 0, 2 in collective 9 of group 0 (all_reduce [[1]] Float); rank 1 in collective 1 of group 1"
    assert any(shown in line for line in decided.finding.evidence)
    answer = api.diagnose_run(watched.folder)
    assert (answer.failure_class, str(answer.first_failure)) == (FailureClass.COLLECTIVE_MISMATCH, "rank 1 on node1")
    assert answer.evidence[0].text.startswith(shown)
    assert "rank 1 was at " in answer.what
    assert frame in answer.what
    assert answer.next_evidence == ()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_still_at_the_end_of_its_step_is_the_root_cause_and_not_a_waiting_one(runs: Runs, rank: int) -> None:
    overrides = ("recovery.step_timeout_s=1", "env.OMP_NUM_THREADS=1")
    watched = runs.start(sys.executable, DDP_SESSION, "100000", "0.01", overrides=overrides)
    watched.wait_for(StepCommitted)
    watched.drill(FaultTarget.COLLECTIVE, rank, FaultAction.HANG, at_step=12)
    assert watched.wait_for(RecoveryDecided).first_failed_rank == rank
    lines = {event.rank: event.commit_line for event in watched.all(RankHung)}
    assert lines[rank] > 0
    assert lines[1 - rank] == 0
    api.cancel(watched.folder, force=True)
