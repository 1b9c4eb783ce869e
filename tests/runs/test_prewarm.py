"""Restarted ranks have their imports done, and train bit-exact with those of a cold start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import PREWARMED, Runs, WatchedRun

from holdfast.events import FaultAction, FaultTarget, FindingRaised, RanksPrewarmed, RanksStarted, StepCommitted
from holdfast.host.processes import all_pids, by_env

pytestmark = pytest.mark.slow

WARM_S = 600.0
PREWARM_TRAINER = Path(__file__).parents[1] / "programs" / "prewarm_trainer.py"


class Started:
    """A run of prewarm_trainer.py on one node, from a copy that may be edited."""

    def __init__(self, runs: Runs, folder: Path) -> None:
        self._runs = runs
        self.program = folder / "program.py"
        self.out = folder / "out"
        self.out.mkdir()
        shutil.copy(PREWARM_TRAINER, self.program)

    def run(self, *overrides: str) -> WatchedRun:
        command = (sys.executable, str(self.program), str(self.out), "100000", "0.2")
        return self._runs.start(*command, nodes=1, overrides=(PREWARMED, *overrides))

    def lives(self, rank: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / f"rank-{rank}").read_text().splitlines()]


@pytest.fixture
def started(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Started(runs, tmp_path)


def held(watched: WatchedRun) -> list[int]:
    """Processes that hold a program of this run."""
    ours = by_env(all_pids(), HOLDFAST_RUN=watched.folder.run_id)
    return [pid for pid in ours if Path(f"/proc/{pid}/comm").read_text() == "holdfast-zygote\n"]


def warmed(watched: WatchedRun) -> RanksPrewarmed:
    """Wait until imports are done; they run while the ranks run, which have priority."""
    return watched.wait_for(RanksPrewarmed, within_s=WARM_S)


def restart(watched: WatchedRun, attempt: int) -> RanksStarted:
    """Lose rank 0, and wait until the next attempt has made some steps."""
    watched.drill(FaultTarget.RANK, 0, FaultAction.KILL)
    again = watched.wait_for(RanksStarted, lambda event: event.attempt == attempt)
    watched.wait_for(StepCommitted, lambda event: event.step >= 5)
    return again


def test_restarted_ranks_are_warm_run_what_was_edited_and_train_to_the_bit_as_cold_ones(started: Started) -> None:
    watched = started.run("ranks_per_node=2")
    assert warmed(watched).ranks == (0, 1)
    started.program.write_text(started.program.read_text().replace('WORD = "first"', 'WORD = "second"'))
    again = restart(watched, 1)
    assert [state.prewarmed for state in again.ranks] == [True, True]
    for rank in (0, 1):
        cold, warm = started.lives(rank)
        assert (cold["before"], cold["word"]) == (0, "first")
        assert (warm["before"] > 500, warm["word"]) == (True, "second")
        assert {**warm, "attempt": "0", "pid": 0, "before": 0, "word": ""} == {**cold, "pid": 0, "word": ""}


def test_held_program_that_dies_is_replaced_and_its_rank_starts_warm(started: Started) -> None:
    watched = started.run()
    warmed(watched)
    (first,) = held(watched)
    os.kill(first, signal.SIGKILL)
    warmed(watched)
    (second,) = held(watched)
    assert first != second
    assert [state.prewarmed for state in restart(watched, 1).ranks] == [True]


def test_job_that_wants_no_warm_start_has_none(started: Started) -> None:
    watched = started.run("recovery.prewarm=false")
    watched.wait_for(StepCommitted)
    assert [state.prewarmed for state in restart(watched, 1).ranks] == [False]
    assert watched.all(RanksPrewarmed) == watched.all(FindingRaised) == held(watched) == []


def test_rank_that_cannot_start_warm_starts_cold_and_says_why_once(started: Started) -> None:
    text = started.program.read_text()
    started.program.write_text(f"import os\nos.environ['A'] = 'B'\n{text}")
    watched = started.run()
    watched.wait_for(StepCommitted)
    for attempt in (1, 2):
        assert [state.prewarmed for state in restart(watched, attempt).ranks] == [False]
    found = [event.finding for event in watched.all(FindingRaised) if event.finding.code == "cold-start"]
    assert len({finding.what.partition(": ")[2] for finding in found}) == len(found)
