"""A run starts with the nodes there are, goes on smaller when one is lost for good, and takes it in when it returns."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runs.conftest import Runs, Watched

from holdfast import api
from holdfast.events import (
    AttemptStarted,
    DrillAction,
    DrillTarget,
    Effect,
    FindingRaised,
    NodeUnavailable,
    Outcome,
    RanksStarted,
    RecoveryDecided,
    StepCommitted,
    WorldChanged,
)

SHORT = ("nodes.wait_s=0.5",)


@pytest.fixture
def capacity(tmp_path: Path) -> None:
    """Profiles with machines for so many nodes."""
    folder = tmp_path / ".holdfast" / "profiles"
    folder.mkdir(parents=True)
    for count in (1, 2, 3):
        (folder / f"room-for-{count}.yaml").write_text(f"capacity: {count}\n")


def lose(watched: Watched, node: int, at_step: int | None = None) -> None:
    watched.drill(DrillTarget.NODE, node, DrillAction.LOSE, at_step)


def give_back(watched: Watched, node: int) -> None:
    watched.drill(DrillTarget.NODE, node, DrillAction.RETURN)


def sizes(watched: Watched) -> list[int]:
    return [event.world_size for event in watched.all(AttemptStarted)]


@pytest.mark.usefixtures("capacity")
def test_run_starts_with_the_nodes_there_are_after_its_wait(runs: Runs) -> None:
    watched = runs.steps(20, profile="room-for-2", overrides=("nodes=2..4", *SHORT))
    assert watched.end().outcome is Outcome.SUCCEEDED
    (changed,) = watched.all(WorldChanged)
    assert (changed.nodes, changed.missing, changed.former_world_size) == ((0, 1), (2, 3), 0)
    assert (changed.world_size, changed.full_world_size) == (2, 4)
    assert "2 machines" in changed.reason
    assert sizes(watched) == [2]


def test_node_lost_for_good_shrinks_the_run_and_grows_it_again_when_it_returns(runs: Runs) -> None:
    watched = runs.steps(4000, overrides=("nodes=2..3", *SHORT))
    lose(watched, 0, at_step=12)
    shrunk = watched.until(WorldChanged)
    assert (shrunk.nodes, shrunk.missing) == ((1, 2), (0,))
    assert (shrunk.world_size, shrunk.former_world_size, shrunk.full_world_size) == (2, 3, 3)
    assert (shrunk.global_batch, shrunk.learning_rate) == (Effect.AS_CONFIGURED, Effect.AS_CONFIGURED)
    ranks = {watched.until(RanksStarted).node for _ in range(2)}
    assert ranks == {1, 2}
    watched.until(StepCommitted)
    assert api.status(watched.folder).degraded
    give_back(watched, 0)
    grown = watched.until(WorldChanged)
    assert (grown.nodes, grown.missing, grown.world_size) == ((0, 1, 2), (), 3)
    watched.until(StepCommitted)
    assert not api.status(watched.folder).degraded
    api.cancel(watched.folder)
    watched.end()
    assert sizes(watched) == [3, 2, 3]
    assert [event.finding.code for event in watched.all(RecoveryDecided)] == ["node-lost"]
    assert "rank 1 of 2" in watched.log(1, attempt=1)


@pytest.mark.usefixtures("capacity")
def test_spare_node_replaces_a_lost_one_without_shrinking(runs: Runs) -> None:
    watched = runs.steps(40, profile="room-for-3", overrides=("nodes=1..2", "nodes.wait_s=60"))
    lose(watched, 1, at_step=12)
    assert watched.end().outcome is Outcome.SUCCEEDED
    assert watched.all(WorldChanged) == []
    assert sizes(watched) == [2, 2]


def test_run_with_too_few_nodes_waits_says_so_and_goes_on_when_it_can(runs: Runs) -> None:
    watched = runs.steps(40, overrides=("nodes=2..3", *SHORT))
    lose(watched, 1, at_step=12)
    watched.until(WorldChanged)
    lose(watched, 2)
    waiting = watched.until(FindingRaised, lambda event: "1 of 3 nodes are there" in event.finding.what)
    assert waiting.finding.code == "too-few-nodes"
    told = api.status(watched.folder).waiting_for
    assert "1 of 3 nodes are there (2 would do)" in told
    assert "cannot be had" in told
    give_back(watched, 2)
    assert watched.end().outcome is Outcome.SUCCEEDED
    assert sizes(watched) == [3, 2, 2]


def test_fixed_run_waits_for_its_node_and_says_why(runs: Runs) -> None:
    watched = runs.steps(40, overrides=SHORT)
    lose(watched, 1, at_step=12)
    watched.until(NodeUnavailable)
    waiting = watched.until(FindingRaised, lambda event: "1 of 2 nodes are there" in event.finding.what)
    assert (waiting.finding.code, waiting.finding.where) == ("too-few-nodes", "node1")
    give_back(watched, 1)
    assert watched.end().outcome is Outcome.SUCCEEDED
    assert watched.all(WorldChanged) == []
