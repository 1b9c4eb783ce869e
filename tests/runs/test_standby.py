"""A standby takes a lost node's place in a real run; that no new node was waited for is seen by who has its ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runs.conftest import PREWARMED, Runs

from holdfast import api
from holdfast.events import (
    AgentConnected,
    AttemptStarted,
    FaultAction,
    FaultTarget,
    NodeUnavailable,
    RanksStarted,
    RecoveryDecided,
    StandbyPromoted,
    StandbyReady,
    StepCommitted,
)

PREWARM_TRAINER = Path(__file__).parents[1] / "programs" / "prewarm_trainer.py"
WARM_S = 250.0


def test_standby_takes_the_place_of_a_killed_node_and_another_is_made(runs: Runs) -> None:
    watched = runs.steps(4000, overrides=("recovery.standby=1",))
    assert watched.wait_for(StandbyReady).node == 2
    watched.first(AttemptStarted)
    watched.drill(FaultTarget.NODE, 0, FaultAction.KILL)
    promoted = watched.wait_for(StandbyPromoted)
    assert (promoted.node, promoted.replaces) == (2, 0)
    again = watched.wait_for(AttemptStarted)
    assert (again.attempt, again.nodes) == (1, (2, 1))
    assert watched.wait_for(StandbyReady).node == 0
    assert api.status(watched.folder).nodes[0].standby
    watched.drill(FaultTarget.NODE, 1, FaultAction.KILL)
    assert watched.wait_for(AttemptStarted).nodes == (2, 0)
    api.cancel(watched.folder)
    watched.wait_for_end()
    assert [event.finding.code for event in watched.all(RecoveryDecided)] == ["node-lost", "node-lost"]


@pytest.fixture
def room_for_three(runs: Runs) -> str:
    targets = runs.base / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "three.yaml").write_text("capacity: 3\n")
    return "three"


def test_run_continues_at_full_strength_although_the_lost_node_cannot_be_had_again(
    runs: Runs, room_for_three: str
) -> None:
    watched = runs.steps(4000, target=room_for_three, overrides=("recovery.standby=1",))
    watched.wait_for(StandbyReady)
    watched.first(AttemptStarted)
    watched.drill(FaultTarget.NODE, 1, FaultAction.REMOVE)
    watched.wait_for(StepCommitted, lambda event: event.attempt == 1)
    api.cancel(watched.folder)
    watched.wait_for_end()
    assert [event.nodes for event in watched.all(AttemptStarted)] == [(0, 1), (0, 2)]
    assert {event.node for event in watched.all(NodeUnavailable)} == {1}
    assert sorted((event.node, event.generation) for event in watched.all(AgentConnected)) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.slow
def test_standby_starts_with_its_imports_done_whosever_place_it_takes(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out"
    out.mkdir()
    command = (sys.executable, str(PREWARM_TRAINER), str(out), "100000", "0.2")
    watched = runs.start(*command, nodes=2, overrides=(PREWARMED, "recovery.standby=1"))
    watched.wait_for(StandbyReady, within_s=WARM_S)
    watched.drill(FaultTarget.NODE, 1, FaultAction.KILL)
    started = watched.wait_for(RanksStarted, lambda event: event.node == 2, within_s=WARM_S)
    assert [(state.rank, state.prewarmed) for state in started.ranks] == [(1, True)]
    watched.wait_for(StepCommitted, lambda event: event.attempt == 1, within_s=WARM_S)
