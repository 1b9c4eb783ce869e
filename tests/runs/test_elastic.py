"""A run starts with the available nodes, continues smaller after a permanent loss, and grows when the node returns."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest
from tests.runs.conftest import Runs, WatchedRun

from holdfast import api
from holdfast.errors import ExitCode
from holdfast.events import (
    AttemptStarted,
    CheckpointCommitted,
    FaultAction,
    FaultTarget,
    FindingRaised,
    NodeUnavailable,
    Outcome,
    RanksStarted,
    RecoveryDecided,
    ScalingEffect,
    StepCommitted,
    WorldSizeChanged,
)

SAMPLE_RECORDER = Path(__file__).parents[1] / "programs" / "sample_recorder.py"
TORCH_S = 150.0
"""Longest that a few ranks with torch take to their first step on a busy machine."""
SHORT = ("nodes.min_nodes_wait_s=0.5",)


@pytest.fixture
def capacity(tmp_path: Path) -> None:
    """Targets with machines for so many nodes."""
    folder = tmp_path / ".holdfast" / "targets"
    folder.mkdir(parents=True)
    for count in (1, 2, 3):
        (folder / f"room-for-{count}.yaml").write_text(f"capacity: {count}\n")


def lose(watched: WatchedRun, node: int, at_step: int | None = None) -> None:
    watched.drill(FaultTarget.NODE, node, FaultAction.REMOVE, at_step)


def give_back(watched: WatchedRun, node: int) -> None:
    watched.drill(FaultTarget.NODE, node, FaultAction.RESTORE)


def sizes(watched: WatchedRun) -> list[int]:
    return [event.world_size for event in watched.all(AttemptStarted)]


@pytest.mark.usefixtures("capacity")
def test_run_starts_with_the_nodes_there_are_after_its_wait(runs: Runs) -> None:
    watched = runs.steps(20, target="room-for-2", overrides=("nodes=2..4", *SHORT))
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    (changed,) = watched.all(WorldSizeChanged)
    assert (changed.nodes, changed.missing_nodes, changed.previous_world_size) == ((0, 1), (2, 3), 0)
    assert (changed.world_size, changed.full_world_size) == (2, 4)
    assert "2 machines" in changed.reason
    assert sizes(watched) == [2]


def test_node_lost_for_good_shrinks_the_run_and_grows_it_again_when_it_returns(runs: Runs) -> None:
    watched = runs.steps(4000, overrides=("nodes=2..3", *SHORT))
    lose(watched, 0, at_step=12)
    shrunk = watched.wait_for(WorldSizeChanged)
    assert (shrunk.nodes, shrunk.missing_nodes) == ((1, 2), (0,))
    assert (shrunk.world_size, shrunk.previous_world_size, shrunk.full_world_size) == (2, 3, 3)
    assert (shrunk.global_batch, shrunk.learning_rate) == (ScalingEffect.AS_CONFIGURED, ScalingEffect.AS_CONFIGURED)
    ranks = {watched.wait_for(RanksStarted).node for _ in range(2)}
    assert ranks == {1, 2}
    watched.wait_for(StepCommitted)
    assert api.status(watched.folder).is_degraded
    give_back(watched, 0)
    grown = watched.wait_for(WorldSizeChanged)
    assert (grown.nodes, grown.missing_nodes, grown.world_size) == ((0, 1, 2), (), 3)
    watched.wait_for(StepCommitted)
    assert not api.status(watched.folder).is_degraded
    api.cancel(watched.folder)
    watched.wait_for_end()
    assert sizes(watched) == [3, 2, 3]
    assert [event.finding.code for event in watched.all(RecoveryDecided)] == ["node-lost"]
    assert "rank 1 of 2" in watched.log(1, attempt=1)


@pytest.mark.usefixtures("capacity")
def test_spare_node_replaces_a_lost_one_without_shrinking(runs: Runs) -> None:
    watched = runs.steps(40, target="room-for-3", overrides=("nodes=1..2", "nodes.min_nodes_wait_s=60"))
    lose(watched, 1, at_step=12)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.all(WorldSizeChanged) == []
    assert sizes(watched) == [2, 2]


def test_run_with_too_few_nodes_waits_says_so_and_continues_when_it_can(runs: Runs) -> None:
    watched = runs.steps(40, overrides=("nodes=2..3", *SHORT))
    lose(watched, 1, at_step=12)
    lose(watched, 2, at_step=30)
    watched.wait_for(WorldSizeChanged)
    waiting = watched.wait_for(FindingRaised, lambda event: "1 of 3 nodes are there" in event.finding.what)
    assert waiting.finding.code == "too-few-nodes"
    told = api.status(watched.folder).waiting_for
    assert "1 of 3 nodes are there (2 would do)" in told
    assert "unavailable" in told
    give_back(watched, 2)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert sizes(watched) == [3, 2, 2]


def test_fixed_run_waits_for_its_node_and_says_why(runs: Runs) -> None:
    watched = runs.steps(40, overrides=SHORT)
    lose(watched, 1, at_step=12)
    watched.wait_for(NodeUnavailable)
    # Its wait may be over before it is known that the node is unavailable.
    # On a busy machine node0 may have been awaited too, at the start.
    waiting = watched.first(
        FindingRaised,
        lambda event: "1 of 2 nodes are there" in event.finding.what and event.finding.where == "node1",
    )
    assert waiting.finding.code == "too-few-nodes"
    give_back(watched, 1)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.all(WorldSizeChanged) == []


def samples_of(watched: WatchedRun) -> dict[int, dict[int, list[int]]]:
    """Sample numbers by step and attempt, from the ranks' own notes."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for notes in watched.folder.checkpoints.glob("samples-*.txt"):
        attempt = int(notes.name.split("-")[1])
        for line in notes.read_text().splitlines():
            step, first, end = map(int, line.split())
            found[step][attempt].extend(range(first, end))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("what", "in_a_step"), [("keep", (4, 4)), ("scale", (4, 2))])
def test_each_sample_is_in_exactly_one_committed_step_whatever_the_world_size(
    runs: Runs, what: str, in_a_step: tuple[int, int]
) -> None:
    whole, small = in_a_step
    overrides = ("nodes=1..2", "checkpoint.every_steps=4", f"recovery.global_batch={what}", *SHORT)
    watched = runs.start(sys.executable, str(SAMPLE_RECORDER), "100000", "2", "0.01", overrides=overrides)
    lose(watched, 0, at_step=10)
    shrunk = watched.wait_for(WorldSizeChanged, within_s=TORCH_S)
    assert shrunk.global_batch is (ScalingEffect.KEPT if what == "keep" else ScalingEffect.SCALED)
    assert (shrunk.samples, shrunk.confirmed) == (small, True)
    kept = watched.wait_for(CheckpointCommitted, lambda event: event.attempt == 1, TORCH_S)
    watched.drill(FaultTarget.RANK, 0, FaultAction.KILL)
    watched.wait_for(StepCommitted, lambda event: event.attempt == 2 and event.step > kept.step + 5, TORCH_S)
    give_back(watched, 0)
    grown = watched.wait_for(WorldSizeChanged, within_s=TORCH_S)
    assert (grown.world_size, grown.samples) == (2, whole)
    watched.wait_for(CheckpointCommitted, lambda event: event.attempt == 3, TORCH_S)
    api.cancel(watched.folder)
    watched.wait_for_end(TORCH_S)

    samples = samples_of(watched)
    final = {step: attempts[max(attempts)] for step, attempts in sorted(samples.items())}
    last = max(final)
    assert list(final) == list(range(1, last + 1))
    assert [number for step in final.values() for number in sorted(step)] == list(range(sum(map(len, final.values()))))
    sizes_of_steps = {max(attempts): len(attempts[max(attempts)]) for attempts in samples.values()}
    assert sizes_of_steps == {0: whole, 1: small, 2: small, 3: whole}
    # Ranks with a Session left on request, so that scaling up cost no step.
    assert min(step for step, attempts in samples.items() if 3 in attempts) == 1 + max(
        step for step, attempts in samples.items() if 2 in attempts
    )


DEAF_NODE = """
import os, time
if "/node1." in os.environ.get("HOLDFAST_NODE", ""):
    time.sleep(3600)
"""


@pytest.mark.slow
def test_node_that_never_joins_ends_the_run_with_its_name_and_where_to_look(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(DEAF_NODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "python"))
    watched = runs.steps(40, overrides=("recovery.join_timeout_s=5",))
    ended = watched.wait_for_end()
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, ExitCode.NODES_LOST)
    assert "node1 has not joined" in ended.reason
    findings = [event.finding for event in watched.all(RecoveryDecided)]
    assert {finding.code for finding in findings} == {"node-never-joined"}
    assert findings[-1].where == "node1"
    assert "nodes/node1.*/agent.log" in findings[-1].remedy
