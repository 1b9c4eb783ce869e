"""Whatever dies, the run resumes from its last checkpoint, and leaves nothing behind at the end."""

from __future__ import annotations

import json
import os
import select
import signal

import pytest
from tests.runs.conftest import Runs, WatchedRun, steps_done

from holdfast import api
from holdfast.events import (
    AgentConnected,
    AttemptStarted,
    CheckpointCommitted,
    ControllerStarted,
    Event,
    FaultAction,
    FaultTarget,
    NodeRequested,
    NodeTerminated,
    Outcome,
    RankExited,
    RanksStarted,
    RecoveryDecided,
    StepCommitted,
)


def kill(pid: int) -> None:
    """Kill a process and return when it has ended."""
    descriptor = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([descriptor], [], [], 10)[0]
    os.close(descriptor)


def test_run_without_faults_succeeds_in_one_attempt(runs: Runs) -> None:
    watched = runs.steps(20)
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.SUCCEEDED, 0)
    assert [event.attempt for event in watched.all(AttemptStarted)] == [0]
    assert [event.step for event in watched.all(StepCommitted)] == list(range(1, 21))
    assert "rank 1 is done" in watched.log(1)


def test_killed_node_gets_a_new_generation_and_ranks_resume_from_the_last_checkpoint(runs: Runs) -> None:
    watched = runs.steps(40, 0.05)  # the next checkpoint is four steps away, which even a slow drill is not
    watched.drill(FaultTarget.NODE, 1, FaultAction.KILL, at_step=21)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    (decided,) = watched.all(RecoveryDecided)
    assert decided.finding.code == "node-lost"
    requested = [(event.node, event.generation) for event in watched.all(NodeRequested)]
    assert requested == [(0, 0), (1, 0), (1, 1)]
    assert "starts at step 21" in watched.log(0, attempt=1)
    assert steps_done(watched) == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize(("action", "seen"), [("stop", "stopped by a signal"), ("hang", "is sleeping")])
def test_rank_that_hangs_before_its_hello_is_the_root_cause(runs: Runs, action: str, seen: str) -> None:
    watched = runs.steps(20, fault=f"{action}@1@0@0", overrides=("recovery.step_timeout_s=1",))
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    (decided,) = watched.all(RecoveryDecided)
    assert (decided.finding.code, decided.first_failed_rank) == ("rank-hung", 1)
    assert "it has not opened its Session" in decided.finding.evidence
    assert any(seen in line for line in decided.finding.evidence)


def test_hang_in_the_loop_is_told_from_waiting_in_a_collective(runs: Runs) -> None:
    watched = runs.steps(40, fault="hang@1@12@0", overrides=("recovery.step_timeout_s=1",))
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    (decided,) = watched.all(RecoveryDecided)
    assert (decided.finding.code, decided.first_failed_rank) == ("rank-hung", 1)


def test_controller_killed_while_ranks_start_comes_back_without_a_rank_restarting(runs: Runs) -> None:
    watched = runs.steps(60, 0.02)
    watched.wait_for(RanksStarted)
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(ControllerStarted)) == 2
    assert len(watched.all(AttemptStarted)) == 1
    assert [event.step for event in watched.all(StepCommitted)] == list(range(1, 61))
    assert len(watched.all(RankExited)) == 2


@pytest.mark.slow
def test_controller_killed_at_many_points_loses_and_doubles_nothing(runs: Runs) -> None:
    watched = runs.steps(100_000, 0.03)
    for events_later in (0, 1, 2, 3, 5, 8, 13, 21):
        controller = watched.wait_for(ControllerStarted).pid
        for _ in range(events_later):
            watched.wait_for(Event)
        kill(controller)
    watched.wait_for(ControllerStarted)
    watched.wait_for(StepCommitted)
    api.cancel(watched.folder, force=True)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    assert len(watched.all(AttemptStarted)) == 1
    assert len(watched.all(ControllerStarted)) == 9
    assert watched.steps() == list(range(1, watched.steps()[-1] + 1))
    assert sorted(event.rank for event in watched.all(RankExited)) == [0, 1]


def test_controller_killed_in_the_middle_of_a_recovery_continues_with_it(runs: Runs) -> None:
    watched = runs.steps(200, 0.02)
    watched.wait_for(StepCommitted, lambda event: event.step == 12)
    controller = watched.all(ControllerStarted)[-1].pid
    watched.drill(FaultTarget.NODE, 1, FaultAction.KILL)
    watched.wait_for(RecoveryDecided)
    os.kill(controller, signal.SIGKILL)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(AttemptStarted)) == 2
    assert steps_done(watched) == list(range(1, 201))


def test_killed_supervisor_and_controller_are_replaced_by_attach(runs: Runs) -> None:
    watched = runs.steps(100, 0.02)
    watched.wait_for(CheckpointCommitted)
    supervisor = json.loads(watched.folder.controller_record.read_text())["supervisor_pid"]
    kill(supervisor)
    kill(watched.all(ControllerStarted)[-1].pid)
    watched_again = WatchedRun(watched.folder)
    assert api.restart_controller(watched.folder)
    assert watched_again.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched_again.all(AttemptStarted)) == 1
    assert [event.step for event in watched_again.all(StepCommitted)] == list(range(1, 101))


def test_agents_without_a_controller_for_too_long_end_their_ranks_and_its_successor_knows_why(runs: Runs) -> None:
    watched = runs.steps(10_000, overrides=("recovery.controller_grace_s=3",))
    started = [watched.wait_for(RanksStarted) for _ in range(2)]
    agents = [event.pid for event in watched.all(AgentConnected)]
    supervisor = json.loads(watched.folder.controller_record.read_text())["supervisor_pid"]
    controller = watched.all(ControllerStarted)[-1].pid
    watched.wait_for(CheckpointCommitted)
    waits = [os.pidfd_open(pid) for pid in (*(state.pid for event in started for state in event.ranks), *agents)]
    os.kill(supervisor, signal.SIGKILL)
    os.kill(controller, signal.SIGKILL)
    for descriptor in waits:
        assert select.select([descriptor], [], [], 40)[0]
        os.close(descriptor)
    again = WatchedRun(watched.folder)
    assert api.restart_controller(watched.folder)
    assert again.wait_for(StepCommitted, lambda event: event.attempt == 1).step > 1
    reasons = {event.reason for event in again.all(NodeTerminated)}
    assert reasons == {"its agent left after 3 s without a controller (recovery.controller_grace_s)"}
    (decided,) = again.all(RecoveryDecided)
    assert decided.finding.code == "node-lost"
    assert reasons <= set(decided.finding.evidence)
