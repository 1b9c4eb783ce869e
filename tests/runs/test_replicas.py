"""Of several replicas only the failed one restarts; the others are not affected."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import Runs, WatchedRun

from holdfast.events import (
    AttemptStarted,
    FaultAction,
    FaultTarget,
    NodeRequested,
    Outcome,
    RankExited,
    RanksStarted,
    RecoveryDecided,
    StepCommitted,
)

TORCHFT = Path(__file__).parents[1] / "programs" / "torchft_ddp.py"
LONG = 1_000_000
"""Steps of a run that ends when its test does."""


def attempts(watched: WatchedRun) -> list[tuple[int, int]]:
    return [(event.replica, event.attempt) for event in watched.all(AttemptStarted)]


def committed(watched: WatchedRun, replica: int, attempt: int) -> list[int]:
    steps = [event for event in watched.all(StepCommitted) if (event.replica, event.attempt) == (replica, attempt)]
    return [step for event in steps for step in range(event.first, event.step + 1)]


@pytest.mark.parametrize(
    ("target", "action", "code"),
    [
        (FaultTarget.RANK, FaultAction.KILL, "rank-killed"),
        (FaultTarget.RANK, FaultAction.STOP, "rank-hung"),
        (FaultTarget.NODE, FaultAction.KILL, "node-lost"),
    ],
)
def test_failure_of_one_replica_is_nothing_to_the_other(
    runs: Runs, target: FaultTarget, action: FaultAction, code: str
) -> None:
    watched = runs.steps(LONG, 0.05, overrides=("recovery.replicas=2", "recovery.step_timeout_s=auto"))
    watched.drill(target, 1, action, at_step=21)
    watched.wait_for(StepCommitted, lambda step: (step.replica, step.attempt) == (1, 1))
    (decided,) = watched.all(RecoveryDecided)
    assert (decided.replica, decided.finding.code) == (1, code)
    assert sorted(attempts(watched)) == [(0, 0), (1, 0), (1, 1)]
    assert "rank 0 of 1 starts at step 21" in watched.log(0, 1, 1, 2)
    told = [line for line in watched.log(0, 0, 0, 2).splitlines() if line.startswith("told")]
    assert told == [
        'told {"type":"replica-down","replica":1,"attempt":0}',
        'told {"type":"replica-starting","replica":1,"attempt":1}',
    ]
    requested = [(event.node, event.generation) for event in watched.all(NodeRequested)]
    assert requested == [(0, 0), (1, 0), *([(1, 1)] if target is FaultTarget.NODE else [])]


def test_two_replicas_on_one_node_are_told_apart(runs: Runs) -> None:
    watched = runs.start(
        "sh", "-c", "env", nodes=1, overrides=("recovery={replicas: 2, min_replicas: 2}", "ranks_per_node=4")
    )
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    for replica in (0, 1):
        for rank in (0, 1):
            env = dict(line.split("=", 1) for line in watched.log(rank, 0, replica, 2).splitlines() if "=" in line)
            told = [env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HOLDFAST_REPLICA", "REPLICA_GROUP_ID")]
            assert told == [str(rank), "2", str(rank), str(replica), str(replica)]
            counts = [env[name] for name in ("HOLDFAST_REPLICA_COUNT", "NUM_REPLICA_GROUPS", "HOLDFAST_MIN_REPLICAS")]
            assert counts == ["2", "2", "2"]


def test_two_replicas_that_die_at_once_both_come_back(runs: Runs) -> None:
    overrides = ("recovery={replicas: 3, min_replicas: 3}", "nodes=3")
    watched = runs.steps(LONG, 0.05, overrides=overrides)
    for replica in (1, 2):
        watched.drill(FaultTarget.RANK, replica, FaultAction.KILL, at_step=23)
    for replica in (1, 2):
        if not committed(watched, replica, 1):
            watched.wait_for(StepCommitted, lambda step, replica=replica: (step.replica, step.attempt) == (replica, 1))
    assert sorted(attempts(watched)) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    told = watched.codes()
    assert told in (
        ["replica-quorum-lost", "replica-quorum-regained"],
        ["replica-quorum-lost", "replica-quorum-regained"] * 2,
    )


def test_replica_that_is_lost_when_another_has_finished_is_left_so(runs: Runs) -> None:
    """What it would come to is there already."""
    program = "import os, time; os.environ['HOLDFAST_REPLICA'] == '1' and time.sleep(3600)"
    watched = runs.start(sys.executable, "-c", program, overrides=("recovery.replicas=2",))
    watched.wait_for(RankExited)
    watched.drill(FaultTarget.RANK, 1, FaultAction.KILL)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert sorted(attempts(watched)) == [(0, 0), (1, 0)]
    assert [event.action for event in watched.all(RecoveryDecided)] == ["ignore: another replica has finished"]


def test_torchft_program_that_leaves_the_store_to_its_launcher_trains_and_survives_a_kill(
    runs: Runs, tmp_path: Path
) -> None:
    """Its Manager is a client of the store at MASTER_PORT; after a kill the store of the next attempt is a new one."""
    watched = runs.start(
        sys.executable, str(TORCHFT), "8", str(tmp_path), overrides=("recovery={replicas: 2, min_replicas: 1}",)
    )
    started = watched.wait_for(RanksStarted, lambda event: event.replica == 1)
    watched.until(lambda: all(has(watched, replica, "step 3 ") for replica in (0, 1)))
    os.kill(started.ranks[0].pid, signal.SIGKILL)
    watched.wait_for(RanksStarted, lambda event: (event.replica, event.attempt) == (1, 1))
    (tmp_path / "go").touch()
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert sorted(attempts(watched)) == [(0, 0), (1, 0), (1, 1)]
    last = [watched.log(0, attempt, replica, 2).splitlines()[-1] for replica, attempt in ((0, 0), (1, 1))]
    assert [line.partition(" ")[0] for line in last] == ["weights", "weights"]
    # It sets variables before it imports torch, so that its imports cannot be kept for the next attempt.
    assert set(watched.codes()) <= {"started-cold"}


def has(watched: WatchedRun, replica: int, text: str) -> bool:
    path = watched.folder.rank_log(0, 0, replica, 2)
    return path.exists() and text in path.read_text()
