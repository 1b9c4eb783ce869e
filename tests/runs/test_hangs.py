"""A rank that keeps the others waiting is found and named, whether or not it reports steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runs.conftest import NCCL_LIKE, Runs

from holdfast import api
from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.events import (
    EvidenceKept,
    FaultAction,
    FaultTarget,
    RankHung,
    RecoveryDecided,
    StacksCompared,
    StepCommitted,
)

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
    assert "system call: clock_nanosleep (a sleep)" in "; ".join(decided.finding.evidence)
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


@pytest.mark.slow
def test_stopped_rank_is_named_by_the_stacks_of_all_and_each_node_keeps_its_evidence(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_USER", "hunter2-hunter2")
    overrides = (
        *("nodes=3", "parallel.dp=3", "secrets.DATA.env=OF_THE_USER"),
        *("recovery.step_timeout_s=2", "env.OMP_NUM_THREADS=1"),
    )
    # A rank sleeps nearly all the time: stopped then, it does not stand where the others wait for it.
    watched = runs.start(sys.executable, DDP_SESSION, "100000", "0.3", overrides=overrides)
    watched.wait_for(StepCommitted, lambda event: event.step >= 12)
    watched.drill(FaultTarget.RANK, 1, FaultAction.STOP)
    decided = watched.wait_for(RecoveryDecided)
    (compared,) = watched.all(StacksCompared)
    assert (decided.first_failed_rank, compared.suspects, compared.nodes) == (1, ((1, 1),), ((1, 1),))
    assert compared.origin == "rank 1"
    assert "stacks: the others wait for rank 1 on node 1" in decided.finding.evidence
    kept = {node: watched.first(EvidenceKept, lambda event, node=node: event.node == node) for node in range(3)}
    assert [str(path) for path in watched.folder.evidence(0)] == [kept[node].folder for node in range(3)]
    shown = [{path.name for path in folder.rglob("*") if path.is_file()} for folder in watched.folder.evidence(0)]
    assert shown[1] >= {"rank-1.log", "stacks-replica-0-attempt-0-rank-1.txt", "environment.json", "versions.json"}
    assert shown[2] >= {
        "rank-2.log",
        "counters.json",
        "monitors.json",
        "stacks-replica-0-attempt-0-rank-2.txt",
        "flight-attempt-0-rank-2.gloo",
    }
    files = [path for folder in watched.folder.evidence(0) for path in folder.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in path.read_bytes() for path in files)
    assert all('"memory"' in path.read_text() for path in files if path.name == "monitors.json")
    answer = api.diagnose_run(watched.folder)
    assert any(each.text == "stacks: the others wait for rank 1 on node 1" for each in answer.evidence)
    assert [note for note in answer.notes if kept[1].folder in note]
    assert api.summary(watched.folder).evidence[-1] in {event.folder for event in kept.values()}
    api.cancel(watched.folder, force=True)
