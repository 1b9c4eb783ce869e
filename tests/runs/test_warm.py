"""Ranks that are started again have their imports done, and train to the bit as those that were started cold."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import Runs, Watched

from holdfast.events import DrillAction, DrillTarget, FindingRaised, RanksStarted, RanksWarmed, StepCommitted
from holdfast.host.processes import all_pids, marked

pytestmark = pytest.mark.slow

WARM_S = 600.0
WARMABLE = Path(__file__).parents[1] / "programs" / "warmable.py"


class Started:
    """A run of warmable.py on one node, from a copy that may be edited."""

    def __init__(self, runs: Runs, folder: Path) -> None:
        self._runs = runs
        self.program = folder / "program.py"
        self.out = folder / "out"
        self.out.mkdir()
        shutil.copy(WARMABLE, self.program)

    def run(self, *overrides: str) -> Watched:
        command = (sys.executable, str(self.program), str(self.out), "100000", "0.2")
        return self._runs.start(*command, nodes=1, overrides=overrides)

    def lives(self, rank: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / f"rank-{rank}").read_text().splitlines()]


@pytest.fixture
def started(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Started(runs, tmp_path)


def held(watched: Watched) -> list[int]:
    """Processes that hold a program of this run."""
    ours = marked(all_pids(), HOLDFAST_RUN=watched.folder.run)
    return [pid for pid in ours if Path(f"/proc/{pid}/comm").read_text() == "holdfast-warm\n"]


def warmed(watched: Watched) -> RanksWarmed:
    """Wait until imports are done; they are done beside the ranks, which are preferred."""
    return watched.until(RanksWarmed, within_s=WARM_S)


def restart(watched: Watched, attempt: int) -> RanksStarted:
    """Lose rank 0, and wait until the next attempt has made some steps."""
    watched.drill(DrillTarget.RANK, 0, DrillAction.KILL)
    again = watched.until(RanksStarted, lambda event: event.attempt == attempt)
    watched.until(StepCommitted, lambda event: event.step >= 5)
    return again


def test_restarted_ranks_are_warm_run_what_was_edited_and_train_to_the_bit_as_cold_ones(started: Started) -> None:
    watched = started.run("ranks_per_node=2")
    assert warmed(watched).ranks == (0, 1)
    started.program.write_text(started.program.read_text().replace('WORD = "first"', 'WORD = "second"'))
    again = restart(watched, 1)
    assert [state.warm for state in again.ranks] == [True, True]
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
    assert [state.warm for state in restart(watched, 1).ranks] == [True]


def test_job_that_wants_no_warm_start_has_none(started: Started) -> None:
    watched = started.run("recovery.warm=false")
    watched.until(StepCommitted)
    assert [state.warm for state in restart(watched, 1).ranks] == [False]
    assert watched.all(RanksWarmed) == watched.all(FindingRaised) == held(watched) == []


def test_rank_that_cannot_start_warm_starts_cold_and_says_why_once(started: Started) -> None:
    text = started.program.read_text()
    started.program.write_text(f"import os\nos.environ['A'] = 'B'\n{text}")
    watched = started.run()
    watched.until(StepCommitted)
    for attempt in (1, 2):
        assert [state.warm for state in restart(watched, attempt).ranks] == [False]
    found = [event.finding for event in watched.all(FindingRaised) if event.finding.code == "started-cold"]
    assert len({finding.what.partition(": ")[2] for finding in found}) == len(found)
