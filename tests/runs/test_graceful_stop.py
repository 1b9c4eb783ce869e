"""A run that must save, stop or give a node back saves first, and recomputes no step."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runs.conftest import PREWARMED, Runs, WatchedRun

from holdfast import api
from holdfast.cli import main
from holdfast.errors import ExitCode
from holdfast.events import (
    AgentConnected,
    AttemptStarted,
    CheckpointCommitted,
    FindingRaised,
    NodeTerminated,
    Outcome,
    ProfileRequested,
    RankExited,
    RanksStarted,
    RecoveryDecided,
    RunFinished,
    StepCommitted,
)
from holdfast.metrics.metric_catalog import ON_REQUEST, has_requested
from holdfast.metrics.profiler_events import STEP
from holdfast.train.metrics.profiler import STEPS

LOOP = Path(__file__).parents[1] / "train" / "loop.py"
"""With a Session, and more steps than anybody waits for."""


def start(runs: Runs, *overrides: str) -> WatchedRun:
    overrides = ("recovery.stop_grace_s=300", "env.OMP_NUM_THREADS=1", *overrides)
    return runs.start(sys.executable, str(LOOP), "1000000000", str(runs.base / "weights"), overrides=overrides)


def terminate_rank(watched: WatchedRun) -> None:
    started = next(event for event in watched.all(RanksStarted) if event.node == 1)
    os.kill(started.ranks[0].pid, signal.SIGTERM)


def terminate_agent(watched: WatchedRun) -> None:
    agent = next(event.pid for event in watched.all(AgentConnected) if event.node == 1)
    for _ in range(2):  # as from a scheduler that signals all processes, and from a process that passes its own on
        os.kill(agent, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tell", "code", "generations"),
    [(terminate_rank, "rank-terminated-externally", {0}), (terminate_agent, "node-preempted", {0, 1})],
)
def test_sigterm_has_every_rank_save_and_the_next_attempt_continues_from_there(
    runs: Runs, tell: Callable[[WatchedRun], None], code: str, generations: set[int]
) -> None:
    watched = start(runs, PREWARMED)
    watched.wait_for(StepCommitted)
    tell(watched)
    decided = watched.wait_for(RecoveryDecided)
    assert decided.finding.code == code
    first = watched.wait_for(StepCommitted, lambda event: event.attempt == 1)
    assert {event.generation for event in watched.all(AgentConnected)} == generations
    last = max(event.step for event in watched.all(StepCommitted) if event.attempt == 0)
    (saved,) = [event for event in watched.all(CheckpointCommitted) if event.attempt == 0]
    assert saved.step == last == first.first - 1
    assert "resumed after" in watched.log(0, attempt=1)


@pytest.mark.slow
def test_checkpoint_is_taken_when_asked_and_cancel_saves_the_last_step(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = start(runs)
    before = watched.wait_for(StepCommitted).step
    assert main(["checkpoint", "-o", "json"]) == 0
    taken = json.loads(capsys.readouterr().out)
    assert taken["step"] > before
    assert Path(taken["path"]).is_dir()
    assert watched.wait_for(CheckpointCommitted).step == taken["step"]
    assert main(["checkpoint", "--timeout", "0"]) == ExitCode.UNAVAILABLE
    assert "checkpoint-not-taken" in capsys.readouterr().err
    api.cancel(watched.folder)
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.CANCELLED, ExitCode.CANCELLED)
    assert {event.code for event in watched.all(RankExited)} == {ExitCode.CHECKPOINTED_AND_EXITED}
    assert watched.all(CheckpointCommitted)[-1].step == max(watched.steps())


def check_merged_trace(path: Path) -> None:
    """As the Trace Event Format has it: named processes by rank, complete events by time, flows with both ends."""
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name, "rank-0.json.gz", "rank-1.json.gz"]
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == ["rank 0 · node0", "rank 1 · node1"]
    timed = [each for each in events if each["ph"] != "M"]
    assert [each["ts"] for each in timed] == sorted(each["ts"] for each in timed)
    assert timed[0]["ts"] == 0
    assert {each["pid"] for each in timed} == names.keys()
    assert all(each["dur"] >= 0 for each in timed if each["ph"] == "X")
    begun = sorted(each["id"] for each in timed if each["ph"] == "s")
    assert begun == sorted(each["id"] for each in timed if each["ph"] == "f")
    for pid in names:
        marks = [each["ts"] for each in timed if each["pid"] == pid and each["name"] == STEP]
        assert len(marks) == STEPS + 1
        assert any(each["name"] == "gloo:all_reduce" for each in timed if each["pid"] == pid)


@pytest.mark.slow
def test_profile_shows_where_a_steps_time_goes(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    watched = start(runs)
    watched.wait_for(StepCommitted)
    assert main(["profile", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"].keys() >= ON_REQUEST
    assert found["failures"] == []
    assert found["summary"][0].startswith("If it were gone, a step of ")
    check_merged_trace(Path(found["trace"]))
    assert main(["status"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a step, profiled: forward" in shown
    told = watched.wait_for(StepCommitted, lambda event: has_requested(event.metrics))
    assert told.metrics.keys() >= ON_REQUEST
    assert len(watched.all(ProfileRequested)) == 1
    # It stands until the next, and when all is over.
    watched.wait_for(StepCommitted)
    assert api.status(watched.folder).leader.metrics["profile_forward_s"] == told.metrics["profile_forward_s"]
    # Without a GPU there is no memory to record, and the trace is kept all the same.
    assert main(["profile", "--memory", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["memory"], [each["code"] for each in found["findings"]]) == ([], ["memory-snapshot-unavailable"])
    assert "uses no GPU" in found["findings"][0]["evidence"][0]
    check_merged_trace(Path(found["trace"]))
    assert main(["cancel", "--force"]) == 0
    watched.wait_for_end()
    capsys.readouterr()
    assert main(["status"]) == 0
    assert "a step, profiled: forward" in " ".join(capsys.readouterr().out.split())


def test_checkpoint_of_a_run_without_a_session_is_refused_with_the_reason(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = runs.start(sys.executable, "-c", "import signal; signal.pause()")
    for _ in range(2):
        watched.wait_for(RanksStarted)
    assert main(["checkpoint"]) == ExitCode.CANNOT_RUN_HERE
    told = capsys.readouterr().err
    assert "[checkpoint-not-taken]" in told
    assert "no rank of node" in told
    assert main(["profile"]) == ExitCode.CANNOT_RUN_HERE
    assert "[step-profile-unavailable]" in capsys.readouterr().err
    assert main(["cancel", "--force"]) == 0
    watched.wait_for_end()
    assert main(["checkpoint"]) == ExitCode.NOT_FOUND


def test_program_without_a_session_gets_sigterm_and_its_grace_when_its_node_is_taken(runs: Runs) -> None:
    stubborn = (
        "import os, signal\n"
        "if os.environ['HOLDFAST_ATTEMPT'] == '0':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
        "    print('up', flush=True)\n"
        "    while True: signal.pause()\n"
    )
    watched = runs.start(sys.executable, "-c", stubborn, overrides=("recovery.stop_grace_s=1",))
    for _ in range(2):
        watched.wait_for(RanksStarted)
    while any("up" not in (watched.log(rank) if watched.folder.rank_log(0, rank).exists() else "") for rank in (0, 1)):
        next(watched._events)
    terminate_agent(watched)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert "told" in watched.log(0)
    assert "told" in watched.log(1)
    assert "ignored-sigterm" in {event.finding.code for event in watched.all(FindingRaised)}
    (decided,) = watched.all(RecoveryDecided)
    assert decided.finding.code == "node-preempted"
    assert watched.all(NodeTerminated)[0].reason == "its agent received SIGTERM"
    assert len(watched.all(AttemptStarted)) == 2
    assert isinstance(watched.seen[-1], RunFinished)
