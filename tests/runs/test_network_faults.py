"""Bad luck with the network: parts of a run that are out of reach for a while, or for good, cost no step."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import TORCH_FREE_TRAINER, Runs, steps_done

from holdfast import api
from holdfast.events import (
    AgentConnected,
    AgentDisconnected,
    AttemptStarted,
    ControllerStarted,
    FaultAction,
    FaultInjected,
    FaultTarget,
    FindingRaised,
    NodeRequested,
    Outcome,
    RanksStarted,
    RecoveryDecided,
    StepCommitted,
)


def test_node_cut_off_for_a_second_costs_nothing(isolated_runs: Runs) -> None:
    watched = isolated_runs.steps(60, 0.02, target="apart")
    watched.drill(FaultTarget.NODE, 1, FaultAction.PARTITION, at_step=12, for_s=1.0)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(FaultInjected)) == 1
    assert len(watched.all(AttemptStarted)) == 1
    assert len(watched.all(NodeRequested)) == 2
    # No upper bound, for machines may be slow; but a step must have waited, or nothing was cut.
    assert max(event.ended - event.started for event in watched.all(StepCommitted)) > 0.9
    assert [event.step for event in watched.all(StepCommitted)] == list(range(1, 61))


def test_agent_stopped_for_a_second_costs_nothing(runs: Runs) -> None:
    watched = runs.steps(60, 0.02)
    watched.drill(FaultTarget.AGENT, 1, FaultAction.STOP, at_step=12, for_s=1.0)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert len(watched.all(FaultInjected)) == 1
    assert len(watched.all(AttemptStarted)) == 1
    assert [event.step for event in watched.all(StepCommitted)] == list(range(1, 61))


HOURS_S = 5 * 3600.0


@pytest.mark.parametrize("by_s", [HOURS_S, -HOURS_S])
def test_clocks_that_jump_by_hours_move_no_deadline_and_are_told(runs: Runs, by_s: float) -> None:
    watched = runs.steps(100_000, 0.02, overrides=("recovery.step_timeout_s=60",))
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.CLOCK_SKEW, at_step=5, amount=by_s)
    watched.drill(FaultTarget.AGENT, 1, FaultAction.CLOCK_SKEW, at_step=7, amount=by_s)
    jumps = [watched.wait_for(FindingRaised, lambda event: event.finding.code == "clock-jumped") for _ in range(2)]
    # The controller's successor sees the true wall clock, and continues the run's.
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    watched.wait_for(ControllerStarted)
    watched.drill(FaultTarget.RANK, 0, FaultAction.KILL)
    watched.wait_for(StepCommitted, lambda event: event.attempt == 1)
    api.cancel(watched.folder, force=True)
    watched.wait_for_end()
    assert {event.finding.where for event in jumps} == {"the controller", "node1"}
    words = f"jumped {HOURS_S:,.1f} s {'ahead' if by_s > 0 else 'back'}"
    assert all(words in event.finding.what for event in jumps)
    assert [event.finding.code for event in watched.all(RecoveryDecided)] == ["rank-killed"]
    assert len(watched.all(NodeRequested)) == 2
    assert set(watched.steps()) == set(range(1, max(watched.steps()) + 1))
    times = [event.at for event in watched.seen]
    assert max(times) - min(times) < HOURS_S / 2
    told = [event.at for event in watched.seen if isinstance(event, StepCommitted | ControllerStarted)]
    assert told == sorted(told)
    account = api.summary(watched.folder).account
    assert 0 < account.total_s < HOURS_S / 2


@pytest.mark.slow
def test_node_out_of_reach_for_thirty_seconds_comes_back_and_nothing_restarts(isolated_runs: Runs) -> None:
    watched = isolated_runs.steps(100_000, 0.02, target="apart")
    watched.drill(FaultTarget.NODE, 1, FaultAction.PARTITION, at_step=12, for_s=30.0)
    watched.wait_for(AgentDisconnected)
    assert watched.wait_for(AgentConnected).generation == 0
    last = watched.wait_for(StepCommitted).step
    watched.wait_for(StepCommitted, lambda event: event.step > last + 10)
    api.cancel(watched.folder, force=True)
    watched.wait_for_end()
    assert len(watched.all(AttemptStarted)) == 1
    assert len(watched.all(NodeRequested)) == 2
    assert watched.steps() == list(range(1, watched.steps()[-1] + 1))


def test_agent_whose_controller_was_replaced_behind_a_cut_finds_the_next_one(isolated_runs: Runs) -> None:
    """Its connection stays half-open: no packet could report that the other end is gone."""
    watched = isolated_runs.steps(100_000, 0.02, target="apart")
    watched.drill(FaultTarget.NODE, 1, FaultAction.PARTITION, at_step=12, for_s=6.0)
    watched.wait_for(FaultInjected)
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    watched.wait_for(ControllerStarted)
    assert watched.wait_for(AgentConnected, lambda event: event.node == 1).generation == 0
    step = watched.steps()[-1]
    watched.wait_for(StepCommitted, lambda event: event.step > step + 10)
    api.cancel(watched.folder, force=True)
    watched.wait_for_end()
    assert (len(watched.all(AttemptStarted)), len(watched.all(NodeRequested))) == (1, 2)
    assert watched.steps() == list(range(1, watched.steps()[-1] + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "target", "grace_s"),
    [
        (FaultAction.PARTITION, FaultTarget.NODE, 45),
        (FaultAction.STOP, FaultTarget.NODE, 9),
        (FaultAction.STOP, FaultTarget.AGENT, 9),
    ],
)
def test_node_out_of_reach_for_good_is_replaced_and_no_step_lost(
    isolated_runs: Runs, action: FaultAction, target: FaultTarget, grace_s: int
) -> None:
    watched = isolated_runs.steps(60, 0.02, target="apart", overrides=(f"recovery.node_grace_s={grace_s}",))
    watched.drill(target, 1, action, at_step=23)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    (decided,) = watched.all(RecoveryDecided)
    assert decided.finding.code == "node-lost"
    assert f"out of reach for recovery.node_grace_s, {grace_s} s" in " ".join(decided.finding.evidence)
    assert [event.generation for event in watched.all(NodeRequested) if event.node == 1] == [0, 1]
    assert "starts at step" in watched.log(1, attempt=1)
    assert steps_done(watched) == list(range(1, 61))


def test_rendezvous_port_taken_by_a_stranger_costs_an_attempt_and_no_more(runs: Runs, tmp_path: Path) -> None:
    go = [tmp_path / f"go-{rank}" for rank in range(2)]
    for pipe in go:
        os.mkfifo(pipe)
    trainer = f"{sys.executable} {TORCH_FREE_TRAINER} 30 0.01"
    wait = f'[ "$HOLDFAST_ATTEMPT" = 0 ] && read line < {tmp_path}/go-$RANK; exec {trainer}'
    watched = runs.start("sh", "-c", wait)
    first = watched.wait_for(AttemptStarted)
    for _ in range(2):
        watched.wait_for(RanksStarted)
    with socket.create_server((first.master_addr, first.master_port)):
        for pipe in go:
            pipe.write_text("go\n")
        assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    (decided,) = watched.all(RecoveryDecided)
    assert decided.finding.code == "rendezvous-port-in-use"
    assert f"port {first.master_port} is taken by process {os.getpid()} (" in " ".join(decided.finding.evidence)
    assert watched.all(AttemptStarted)[1].master_port != first.master_port
    assert watched.steps() == list(range(1, 31))
