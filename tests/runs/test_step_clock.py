"""Torch programs that know nothing of holdfast: their steps are counted, and their hangs found."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import STEP_CLOCK, Runs

from holdfast import api
from holdfast.cli import main
from holdfast.events import Outcome, RankHung, RecoveryDecided, StepCommitted
from holdfast.metrics.metric_catalog import ON_REQUEST
from holdfast.metrics.profiler_events import STEP
from holdfast.train.metrics.profiler import STEPS

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


def test_ranks_of_torchrun_have_clocks_of_their_own_and_are_profiled(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    watched = runs.start(
        torchrun, TRAINER, "1000000", "none", nodes=1, overrides=(*STEP_CLOCK, "launch=per-node", "ranks_per_node=2")
    )
    watched.wait_for(StepCommitted)
    assert main(["profile", "--memory", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failures"] == []
    assert (found["memory"], [each["code"] for each in found["findings"]]) == ([], ["memory-snapshot-unavailable"])
    assert found["metrics"].keys() >= ON_REQUEST
    assert found["metrics"]["profile_other_s"] < found["metrics"]["profile_optimizer_s"]  # where its loop sleeps
    assert found["summary"][0].startswith("If it were gone, a step of ")
    with gzip.open(found["trace"]) as file:
        events = json.load(file)["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0 · node0", "rank 1 · node0"]
    for pid in names:
        of_rank = [each["name"] for each in events if each["pid"] == pid]
        assert of_rank.count(STEP) == STEPS + 1
        assert "gloo:all_reduce" in of_rank
    assert main(["cancel", "--force"]) == 0
    watched.wait_for_end()
    steps = watched.all(StepCommitted)
    assert steps[0].first == 1
    assert all(step.step_clock for step in steps)
