"""128 nodes on one real controller: all join, one is lost, everybody is stopped and started again, by few lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.simulated_run import SimulatedRun

from holdfast.events import (
    AgentConnected,
    AnyEvent,
    AttemptStarted,
    ControllerStarted,
    NodeRequested,
    NodesStarted,
    NodesStopped,
    RankExited,
    RanksExited,
    RanksStarted,
    RanksStopped,
    RecoveryDecided,
    StepCommitted,
    from_ranges,
)
from holdfast.report.rank_table import RankPhase
from holdfast.report.run_status import NodePhase
from holdfast.report.status_reducer import status_from_events

NODES, RANKS = 128, 8
WITHIN_S = 90.0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[SimulatedRun]:
    with SimulatedRun(tmp_path / "run", NODES) as run:
        yield run


def of(events: list[AnyEvent], *kinds: type[AnyEvent]) -> list[AnyEvent]:
    return [event for event in events if isinstance(event, kinds)]


def started(events: list[AnyEvent], attempt: int) -> set[int]:
    """Nodes that are known to have started an attempt's ranks."""
    crowd = (event for event in of(events, NodesStarted) if isinstance(event, NodesStarted))
    alone = (event for event in of(events, RanksStarted) if isinstance(event, RanksStarted))
    return {node for event in crowd if event.attempt == attempt for node in from_ranges(event.nodes)} | {
        event.node for event in alone if event.attempt == attempt
    }


def everybody_started(attempt: int) -> object:
    return lambda events: len(started(events, attempt)) == NODES


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lost_node_of_many_is_replaced_and_everybody_starts_again(fleet: SimulatedRun) -> None:
    fleet.wait_until(everybody_started(0), WITHIN_S)  # type: ignore[arg-type]
    assert len(of(fleet.events, AgentConnected)) == NODES
    for step in (1, 2, 3):
        fleet.step(step, 0.1)
    fleet.wait_until(lambda events: len(of(events, StepCommitted)) == 3, WITHIN_S)
    fleet.remove_node(77)
    assert len(fleet.orders("stop", 0, WITHIN_S)) == NODES - 1
    assert len(fleet.orders("start", 1, WITHIN_S)) == NODES
    fleet.wait_until(everybody_started(1), WITHIN_S)  # type: ignore[arg-type]
    (decided,) = of(fleet.events, RecoveryDecided)
    assert isinstance(decided, RecoveryDecided)
    assert decided.finding.code == "node-lost"
    requested = [(event.node, event.generation) for event in of(fleet.events, NodeRequested) if event.node == 77]
    assert requested == [(77, 0), (77, 1)]
    first, second = of(fleet.events, AttemptStarted)
    assert (first.world_size, second.world_size) == (NODES * RANKS, NODES * RANKS)
    few = of(fleet.events, RankExited, RanksExited, RanksStopped, NodesStopped, RanksStarted, NodesStarted)
    assert len(few) < NODES
    status = status_from_events(fleet.events)
    assert all(node.phase is NodePhase.JOINED for node in status.nodes.values())
    ranks = status.leader.ranks
    assert sorted(ranks) == list(range(NODES * RANKS))
    assert all(rank.phase is RankPhase.RUNNING and rank.node == rank.rank // RANKS for rank in ranks.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_controller_killed_while_everybody_is_stopped_is_replaced_and_the_restart_continues(
    fleet: SimulatedRun,
) -> None:
    fleet.wait_until(everybody_started(0), WITHIN_S)  # type: ignore[arg-type]
    fleet.remove_node(5)
    fleet.replace_controller()
    fleet.wait_until(lambda events: len(of(events, ControllerStarted)) == 2, WITHIN_S)
    fleet.wait_until(everybody_started(1), WITHIN_S)  # type: ignore[arg-type]
    assert len(of(fleet.events, RecoveryDecided)) == 1
    assert [event.attempt for event in of(fleet.events, AttemptStarted)] == [0, 1]
    fleet.step(1, 0.1)
    fleet.wait_until(lambda events: len(of(events, StepCommitted)) == 1, WITHIN_S)
    fleet.replace_controller()
    fleet.step(2, 0.1)
    fleet.wait_until(lambda events: len(of(events, StepCommitted)) == 2, WITHIN_S)
    assert [event.step for event in of(fleet.events, StepCommitted)] == [1, 2]
    assert len(of(fleet.events, AttemptStarted)) == 2
