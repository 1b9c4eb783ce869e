"""Standbys: whose place they take and when, and that one which is not ready never does."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.control.test_machine import Run, exited, joined, killed, stopped

from holdfast.control.commands import Command, PrepareNode, ReplaceNode, Send, StartAttempt, SubmitNodes
from holdfast.control.state import NodePhase, ReplicaPhase, Timer
from holdfast.events import (
    AttemptStarted,
    FindingRaised,
    NodeCreated,
    NodeRequested,
    NodeTerminated,
    NodeUnavailable,
    RecoveryDecided,
    StandbyPromoted,
    StandbyReady,
    TimerExpired,
)


def ready(node: int, *, generation: int = 0, at: float = 2.0) -> StandbyReady:
    return StandbyReady(at=at, node=node, generation=generation)


def gone(node: int, *, generation: int = 0, at: float = 20.0) -> NodeTerminated:
    return NodeTerminated(at=at, node=node, generation=generation, reason="its agent was ended by SIGKILL")


def training(*, standby: int = 1, nodes: int = 2, replicas: int = 1, least: int | None = None) -> Run:
    """At work, with every standby ready."""
    run = Run(nodes=nodes, replicas=replicas, least=least, standby=standby).running()
    run.do(*(ready(node) for node in range(nodes, nodes + standby)))
    return run


def promotions(run: Run) -> list[tuple[int, int]]:
    return [(event.node, event.replaces) for event in run.decisions if isinstance(event, StandbyPromoted)]


def starts(commands: list[Command]) -> list[tuple[int, ...]]:
    return [command.nodes for command in commands if isinstance(command, StartAttempt)]


def test_standbys_are_asked_for_with_the_run_and_no_rank_starts_on_them() -> None:
    run = Run(nodes=2, standby=1)
    run.do(joined(0))
    assert starts(run.do(joined(1))) == [(0, 1)]
    assert run.do(joined(2)) == [PrepareNode(node=2)]


def test_ready_standby_takes_the_place_of_a_lost_node_at_once_with_its_ranks() -> None:
    run = training()
    run.do(gone(0))
    assert promotions(run) == [(2, 0)]
    asked = [event for event in run.decisions if isinstance(event, NodeRequested)]
    assert [(event.node, event.generation, event.standby) for event in asked] == [(0, 1, True)]
    commands = run.do(stopped(1))
    assert starts(commands) == [(2, 1)]
    (attempt,) = (event for event in run.decisions if isinstance(event, AttemptStarted))
    assert (attempt.nodes, attempt.master_addr, attempt.world_size) == ((2, 1), "10.0.0.2", 2)


@pytest.mark.parametrize(
    ("standbys", "action"), [(1, "put a standby in its place and restart"), (0, "replace the node and restart")]
)
def test_decision_says_whether_a_standby_takes_the_place(standbys: int, action: str) -> None:
    run = training(standby=standbys)
    run.do(gone(0), stopped(1))
    assert [event.action for event in run.decisions if isinstance(event, RecoveryDecided)] == [action]


def test_slot_of_the_lost_node_is_a_standby_s_from_then_on() -> None:
    run = training()
    run.do(gone(0), stopped(1), NodeCreated(at=22.0, node=0, generation=1))
    assert run.do(joined(0, generation=1, at=23.0)) == [PrepareNode(node=0)]
    assert run.state.nodes[0].replica is None
    run.do(ready(0, generation=1, at=24.0), gone(2, at=30.0))
    assert promotions(run) == [(0, 2)]
    assert starts(run.do(stopped(1, attempt=1))) == [(0, 1)]


def test_standby_that_has_not_said_that_it_is_ready_is_never_promoted() -> None:
    run = Run(nodes=2, standby=1).running()
    commands = run.do(gone(0), stopped(1))
    assert (promotions(run), starts(commands)) == ([], [])
    assert starts(run.do(joined(0, generation=1, at=22.0))) == [(0, 1)]


def test_standby_that_gets_ready_while_a_node_is_awaited_takes_its_place() -> None:
    run = Run(nodes=2, standby=1).running()
    run.do(gone(0), stopped(1))
    assert starts(run.do(ready(2, at=22.0))) == [(2, 1)]


def test_standby_whose_agent_is_another_has_to_get_ready_again() -> None:
    run = training()
    assert run.do(joined(2, incarnation="other", at=10.0)) == [PrepareNode(node=2)]
    run.do(gone(0))
    assert promotions(run) == []


def test_word_of_an_earlier_generation_makes_no_standby_ready() -> None:
    run = training()
    run.do(gone(2, at=10.0), joined(2, generation=1, at=11.0), ready(2, generation=0, at=12.0), gone(0))
    assert promotions(run) == []


def test_standby_out_of_reach_is_not_promoted() -> None:
    run = training()
    node = run.state.nodes[2]
    run.state = run.state.with_nodes((replace(node, phase=NodePhase.DISCONNECTED),))
    run.do(gone(0))
    assert promotions(run) == []


def test_lost_standby_is_made_again_and_stops_nothing() -> None:
    run = training()
    commands = run.do(gone(2))
    assert [type(command) for command in commands] == [Send, ReplaceNode]
    assert run.phase() is ReplicaPhase.RUNNING
    assert not any(isinstance(event, RecoveryDecided) for event in run.decisions)


def test_standby_that_does_not_join_is_said_and_made_again() -> None:
    run = Run(nodes=2, standby=1)
    run.do(joined(0), joined(1), NodeCreated(at=5.0, node=2, generation=0))
    key = Timer.STANDBY_JOIN.key(2)
    assert run.do(TimerExpired(at=124.0, timer=key)) == []
    commands = run.do(TimerExpired(at=125.0, timer=key))
    assert [command.node_id.generation for command in commands if isinstance(command, ReplaceNode)] == [1]
    assert [event.finding.code for event in run.decisions if isinstance(event, FindingRaised)] == ["node-never-joined"]
    assert run.phase() is ReplicaPhase.RUNNING


def test_ranks_of_a_node_out_of_reach_are_known_to_be_gone_before_a_standby_takes_their_place() -> None:
    run = training()
    run.do(TimerExpired(at=9.0, timer="nothing"))
    node = run.state.nodes[0]
    run.state = run.state.with_nodes((replace(node, phase=NodePhase.DISCONNECTED),)).with_timer("reconnect:0", 60.0)
    run.do(TimerExpired(at=60.0, timer="reconnect:0"))
    assert promotions(run) == []
    assert starts(run.do(stopped(1))) == []
    assert starts(run.do(NodeCreated(at=62.0, node=0, generation=1))) == [(2, 1)]


def test_node_that_cannot_be_had_at_first_is_stood_in_for() -> None:
    run = Run(nodes=2, standby=1)
    run.do(joined(0), joined(2), ready(2))
    assert promotions(run) == []
    commands = run.do(NodeUnavailable(at=3.0, node=1, generation=0, reason="no machine"))
    assert starts(commands) == [(0, 2)]


def test_standby_of_replicas_takes_the_lost_one_s_place_and_the_others_continue() -> None:
    run = training(replicas=2)
    commands = run.do(gone(1))
    assert promotions(run) == [(2, 1)]
    assert starts(commands) == [(2,)]
    assert run.state.replicas[1].members == (2,)
    assert run.phase(0) is ReplicaPhase.RUNNING


def test_elastic_run_stays_whole_with_a_standby() -> None:
    run = training(nodes=3, least=2)
    run.do(gone(1))
    commands = run.do(stopped(0), stopped(2))
    assert starts(commands) == [(0, 3, 2)]


def test_no_standby_is_promoted_or_asked_for_while_the_run_ends() -> None:
    run = training()
    run.do(exited(0, code=3, at=12.0), killed(1, at=12.0), stopped(0), stopped(1))
    commands = run.do(gone(0, at=14.0))
    assert run.state.ending is not None
    assert not any(isinstance(command, ReplaceNode | SubmitNodes) for command in commands)
    assert promotions(run) == []
