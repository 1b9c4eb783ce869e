"""A live run whose ranks are stuck: `status` shows the position of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import Runs, WatchedRun
from tests.waiting import until

from holdfast import api, run_diagnosis
from holdfast.cli import main
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.events import RankExited, StacksDumped

PROGRAM = Path(__file__).parents[1] / "programs" / "hang_without_session.py"
STILL_S = 1.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_diagnosis, "DIAGNOSE_IDLE_S", STILL_S)
    monkeypatch.setattr(run_diagnosis, "STATUS_IDLE_S", STILL_S)


def standing(runs: Runs, how: str) -> WatchedRun:
    watched = runs.start(sys.executable, str(PROGRAM), how)
    logs = [watched.folder.rank_log(0, rank) for rank in (0, 1)]
    until(lambda: all(log.exists() and "met" in log.read_text() for log in logs))
    until(lambda: api.standstill_finding(watched.folder) is not None)
    return watched


def test_rank_that_waits_elsewhere_is_named_with_the_collective_that_the_other_waits_in(runs: Runs) -> None:
    watched = standing(runs, "apart")
    answer = api.diagnose_run(watched.folder)
    assert answer.failure_class is FailureClass.COLLECTIVE_MISMATCH
    assert answer.first_failure is not None
    assert answer.first_failure.rank == 0
    assert "no output for " in answer.what
    assert "rank 0 on node0 is in wait_for_lock (hang_without_session.py:" in answer.what
    assert "rank 1 on node1 is in all_reduce (torch/distributed/" in answer.what
    watched.wait_for(StacksDumped)
    watched.wait_for(StacksDumped)


def test_native_frames_show_the_calls_of_c_in_which_ranks_wait(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    watched = standing(runs, "apart")
    assert main(["diagnose", watched.folder.run_id, "--native", "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    lines = [each["text"] for each in answer["evidence"] if each["text"].startswith("native: ")]
    assert any(line.startswith("native: rank 0 in ") and "libc.so" in line for line in lines), answer
    assert any(line.startswith("native: rank 1 in ") and "c10d::" in line for line in lines), answer
    assert answer["failure_class"] == FailureClass.COLLECTIVE_MISMATCH.value
    assert answer["notes"] == []
    assert len([each for each in api.events(watched.folder) if isinstance(each, StacksDumped)]) == 2


def test_rank_that_waits_after_another_has_ended_well_is_told(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    watched = standing(runs, "left")
    watched.first(RankExited)
    until(lambda: "ended" in getattr(api.standstill_finding(watched.folder), "what", ""))
    answer = api.diagnose_run(watched.folder)
    assert "rank 0 on node0 ended " in answer.what
    assert " ago with exit code 0; rank 1 on node1 is in wait_for_lock (hang_without_session.py:" in answer.what
    assert main(["status"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no output for " in shown
    assert f"`holdfast diagnose {watched.folder.run_id}`" in shown
