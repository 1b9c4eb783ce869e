"""How many nodes an attempt has: which nodes it waits for, continues without, and takes back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.control.test_machine import (
    GRACE_S,
    exited,
    fault,
    gone,
    hung,
    joined,
    killed,
    left,
    look,
    sent,
    stop,
    stopped,
)
from tests.control.test_machine import Run as FixedRun

from holdfast.control.commands import (
    Cordon,
    ReplaceNode,
    StartAttempt,
    Uncordon,
)
from holdfast.control.policy import EXIT_GRACE_S, JOIN_TRIES, SCALE_UP_PAUSE_S
from holdfast.control.state import ReplicaPhase
from holdfast.events import (
    AttemptStarted,
    CheckpointCommitted,
    ControllerStarted,
    FaultAction,
    FaultInjected,
    FaultRequested,
    FaultTarget,
    FindingRaised,
    NodeCreated,
    NodeRequested,
    NodeUnavailable,
    RecoveryDecided,
    ScalingEffect,
    StepCommitted,
    TimerExpired,
    WorldSizeChanged,
)
from holdfast.job.backend import NodeId
from holdfast.job.spec import GlobalBatch, LearningRate
from holdfast.protocol.orders import CheckpointAndExit

WAIT_S = 60.0
GROW_WITHIN_S = 1800.0
JOIN_S = 120.0
EARLY = 75


class Run(FixedRun):
    """A machine of a job for 2 to 4 nodes."""

    def __init__(self, **recovery: object) -> None:
        super().__init__(nodes=4, least=2, **recovery)

    def whole(self) -> Run:
        self.do(*(joined(node) for node in range(4)))
        assert self.members == (0, 1, 2, 3)
        return self

    def small(self) -> Run:
        """On nodes 1 and 2, since 0 and 3 were lost for good."""
        self.whole()
        self.lose(0, 3, at=20.0)
        self.pass_("min-nodes:0", 80.0)
        assert self.members == (1, 2)
        return self

    def lose(self, *nodes: int, at: float, attempt: int = 0) -> None:
        """Nodes are lost for good; the others end their ranks."""
        self.do(*(gone(node, at=at) for node in nodes))
        self.do(*(stopped(node, attempt=attempt) for node in self.members if node not in nodes))
        self.do(*(unavailable(node, at=at) for node in nodes))

    def pass_(self, deadline: str, at: float) -> list[object]:
        assert self.state.timers[deadline] == at
        return list(self.do(TimerExpired(at=at, timer=deadline)))

    @property
    def members(self) -> tuple[int, ...]:
        return self.state.replicas[0].members

    def told(self, kind: type) -> list[object]:
        return [event for event in self.decisions if isinstance(event, kind)]


def unavailable(node: int, *, at: float = 1.0) -> NodeUnavailable:
    """The first node of a slot, or later the one in the place of one that was lost."""
    return NodeUnavailable(at=at, node=node, generation=int(at > 1), reason="full")


def step(number: int, attempt: int = 0, *, took_s: float = 2.0, **metrics: float) -> StepCommitted:
    return StepCommitted(
        at=9.0, replica=0, attempt=attempt, step=number, started=9.0 - took_s, ended=9.0, metrics=metrics
    )


# Waiting


def test_run_starts_with_the_nodes_there_are_when_its_wait_is_over() -> None:
    run = Run()
    assert run.do(joined(0), joined(1), unavailable(2), unavailable(3)) == []
    (start,) = run.pass_("min-nodes:0", WAIT_S)
    assert isinstance(start, StartAttempt)
    assert start.nodes == (0, 1)
    (changed,) = run.told(WorldSizeChanged)
    assert isinstance(changed, WorldSizeChanged)
    assert (changed.nodes, changed.missing_nodes, changed.previous_world_size) == ((0, 1), (2, 3), 0)
    assert "node2 unavailable" in changed.reason
    assert [type(event) for event in run.decisions] == [WorldSizeChanged, AttemptStarted]


def test_node_that_was_made_is_waited_for_until_it_should_have_joined() -> None:
    run = Run()
    run.do(*(NodeCreated(at=5.0, node=node, generation=0) for node in range(4)))
    run.do(joined(0), joined(1), joined(3))
    assert run.pass_("min-nodes:0", WAIT_S) == []
    assert run.pass_("join:0", JOIN_S) == []  # set when they were asked for
    replaced, start = run.pass_("join:0", 5.0 + JOIN_S)[::-1]
    assert isinstance(start, StartAttempt)
    assert start.nodes == (0, 1, 3)
    assert isinstance(replaced, ReplaceNode)
    assert [event.finding.code for event in run.told(FindingRaised)] == ["node-never-joined"]  # type: ignore[attr-defined]


def test_gang_that_was_away_as_a_whole_is_waited_for_as_a_whole_again() -> None:
    run = Run().whole()
    run.do(*(gone(node) for node in range(4)), *(unavailable(node, at=20.0) for node in range(4)))
    run.pass_("min-nodes:0", 20.0 + WAIT_S)
    late = 1000.0
    run.do(*(NodeCreated(at=late, node=node, generation=1) for node in (0, 1)))
    assert run.do(*(joined(node, at=late + 1, generation=1) for node in (0, 1))) == []
    (start,) = run.do(*(joined(node, at=late + 2, generation=1) for node in (2, 3)))
    assert isinstance(start, StartAttempt)
    assert start.nodes == (0, 1, 2, 3)


def test_lost_node_that_is_replaced_in_time_shrinks_nothing() -> None:
    run = Run().whole()
    run.do(gone(1), *(stopped(node) for node in (0, 2, 3)))
    (start,) = run.do(joined(1, at=30.0, generation=1))
    assert isinstance(start, StartAttempt)
    assert start.nodes == (0, 1, 2, 3)
    assert run.told(WorldSizeChanged) == []


def test_lost_nodes_that_cannot_be_had_are_done_without_and_ranks_stay_in_a_row() -> None:
    run = Run().small()
    (changed,) = run.told(WorldSizeChanged)
    assert isinstance(changed, WorldSizeChanged)
    assert (changed.nodes, changed.missing_nodes) == ((1, 2), (0, 3))
    assert (changed.world_size, changed.previous_world_size, changed.full_world_size) == (2, 4, 4)
    assert run.state.node_at(0, 1) == 2
    assert run.state.node_at(0, 2) is None


def test_no_rank_starts_while_those_of_a_lost_node_may_live() -> None:
    run = Run().whole()
    run.do(left(1))
    away = next(key for key in run.state.timers if key.startswith("reconnect"))
    run.do(TimerExpired(at=50.0, timer=away), *(stopped(node) for node in (0, 2, 3)))
    assert run.pass_("min-nodes:0", 50.0 + WAIT_S) == []
    (start,) = run.do(unavailable(1, at=130.0))
    assert isinstance(start, StartAttempt)
    assert start.nodes == (0, 2, 3)


def test_replica_with_too_few_nodes_waits_says_so_and_continues_with_enough() -> None:
    run = Run().whole()
    run.lose(0, 1, 2, at=20.0)
    assert run.pass_("min-nodes:0", 80.0) == []
    (found,) = run.told(FindingRaised)
    assert isinstance(found, FindingRaised)
    assert (found.finding.code, found.finding.where) == ("too-few-nodes", "node0, node1, node2")
    run.do(NodeCreated(at=90.0, node=1, generation=1))
    (start,) = run.do(joined(1, at=91.0, generation=1))
    assert isinstance(start, StartAttempt)
    assert start.nodes == (1, 3)


def test_wait_for_nodes_that_ends_while_ranks_are_stopped_is_reported_too() -> None:
    run = Run().whole()
    run.do(*(gone(node, at=20.0) for node in (0, 1, 2)), *(unavailable(node, at=20.0) for node in (0, 1, 2)))
    assert run.phase() is ReplicaPhase.STOPPING
    run.pass_("min-nodes:0", 20.0 + WAIT_S)
    (found,) = run.told(FindingRaised)
    assert isinstance(found, FindingRaised)
    assert found.finding.code == "too-few-nodes"
    assert run.phase() is ReplicaPhase.STOPPING


def test_node_that_is_not_needed_is_lost_without_a_failure() -> None:
    run = Run().small()
    run.do(NodeCreated(at=90.0, node=0, generation=1))
    (replaced,) = run.do(gone(0, at=91.0, generation=1))
    assert isinstance(replaced, ReplaceNode)
    assert run.phase() is ReplicaPhase.RUNNING
    assert run.told(RecoveryDecided) == []


# Growing


def winding_down() -> Run:
    """On two nodes, asked to leave since a third is there."""
    run = Run().small()
    ((_, nodes),) = sent(run.do(joined(3, at=100.0, generation=1)), CheckpointAndExit)
    assert nodes == (1, 2)
    assert [event.finding.code for event in run.told(FindingRaised)] == ["scale-up-started"]  # type: ignore[attr-defined]
    return run


def test_ranks_that_leave_when_asked_start_again_with_more_and_nothing_has_failed() -> None:
    run = winding_down()
    early = (exited(node, rank=rank, code=EARLY, left=True, attempt=1) for rank, node in enumerate((1, 2)))
    assert run.do(*early, stopped(1, attempt=1)) == []
    (start,) = run.do(stopped(2, attempt=1))
    assert isinstance(start, StartAttempt)
    assert start.nodes == (1, 2, 3)
    assert [type(event) for event in run.decisions] == [WorldSizeChanged, AttemptStarted]
    assert len(run.state.replicas[0].failures) == 1  # the nodes that were lost


def test_ranks_that_finish_instead_of_leaving_end_the_run_well() -> None:
    run = winding_down()
    run.do(*(exited(node, rank=rank, attempt=1) for rank, node in enumerate((1, 2))))
    run.do(stopped(1, attempt=1), stopped(2, attempt=1))
    assert run.state.ending is not None
    assert run.state.ending.exit_code == 0


def test_ranks_that_only_checkpoint_are_told_to_end_soon_after_it_with_a_grace() -> None:
    run = winding_down()
    checkpoint = CheckpointCommitted(at=130.0, node=1, replica=0, attempt=1, step=7, path="step-7")
    assert run.do(checkpoint) == []
    assert run.pass_("exit:0", 130.0 + EXIT_GRACE_S) == [stop(1, 2, attempt=1, grace_s=GRACE_S)]
    run.do(killed(1, rank=0, attempt=1, stopped=True), killed(2, rank=1, attempt=1, stopped=True))
    run.do(stopped(1, attempt=1), stopped(2, attempt=1))
    assert run.members == (1, 2, 3)
    assert run.told(RecoveryDecided) == []


def test_ranks_that_take_no_checkpoint_are_told_to_end_when_the_stated_time_is_over() -> None:
    run = winding_down()
    assert run.pass_("exit:0", 100.0 + GROW_WITHIN_S) == [stop(1, 2, attempt=1, grace_s=GRACE_S)]


def test_failure_while_ranks_leave_is_a_failure_and_waits_for_nobody() -> None:
    run = winding_down()
    assert run.do(killed(1, rank=0, attempt=1)) == [stop(1, 2, attempt=1)]
    run.do(stopped(1, attempt=1), stopped(2, attempt=1))
    assert [event.finding.code for event in run.told(RecoveryDecided)] == ["rank-killed"]  # type: ignore[attr-defined]
    assert run.members == (1, 2, 3)


def test_agent_that_comes_back_while_ranks_leave_is_asked_again() -> None:
    run = winding_down()
    run.do(left(1, at=101.0))
    ((_, nodes),) = sent(run.do(joined(1, at=102.0, attempt=1)), CheckpointAndExit)
    assert nodes == (1,)


def test_nodes_that_are_on_their_way_are_taken_in_together() -> None:
    run = Run().small()
    assert run.do(*(NodeCreated(at=90.0, node=node, generation=1) for node in (0, 3))) == []
    assert run.do(joined(3, at=91.0, generation=1)) == []
    assert len(sent(run.do(joined(0, at=92.0, generation=1)), CheckpointAndExit)) == 1


def test_node_that_joins_while_a_hang_is_suspected_is_taken_in_when_a_step_ends_that() -> None:
    run = Run().small()
    run.do(replace(hung(1, at=90.0), attempt=1))
    assert sent(run.do(joined(3, at=91.0, generation=1)), CheckpointAndExit) == []
    assert len(sent(run.do(replace(step(8, attempt=1), ended=93.0)), CheckpointAndExit)) == 1


def test_second_growth_comes_no_sooner_than_its_pause_after_the_first() -> None:
    run = winding_down()
    run.do(*(exited(node, rank=rank, code=EARLY, left=True, attempt=1, at=110.0) for rank, node in enumerate((1, 2))))
    run.do(stopped(1, attempt=1), stopped(2, attempt=1))
    (grown_at,) = run.state.replicas[0].scale_ups
    assert run.do(joined(0, at=grown_at + 1, generation=1)) == []
    assert len(sent(run.pass_("scale-up:0", grown_at + SCALE_UP_PAUSE_S), CheckpointAndExit)) == 1


# Nodes that never join


def test_node_that_never_joins_is_made_again_then_given_up_with_its_name_and_where_to_look() -> None:
    run = FixedRun()
    run.do(joined(0))
    for generation in range(1, JOIN_TRIES):
        (replaced,) = run.do(TimerExpired(at=JOIN_S * generation, timer="join:0"))
        assert replaced == ReplaceNode(
            node_id=NodeId(node=1, generation=generation), reason="no message from its agent for 120 s"
        )
        assert [type(event) for event in run.decisions] == [FindingRaised, RecoveryDecided, NodeRequested]
    run.do(TimerExpired(at=JOIN_S * JOIN_TRIES, timer="join:0"))
    assert run.state.ending is not None
    assert run.state.ending.exit_code == 79
    assert "node1 has not joined; it was made 3 times" in run.state.ending.reason
    decided = next(event for event in run.decisions if isinstance(event, RecoveryDecided))
    assert (decided.finding.code, decided.finding.where) == ("node-never-joined", "node1")
    assert "nodes/node1.*/agent.log" in decided.finding.remedy


def test_node_that_cannot_be_had_is_waited_for_without_an_end() -> None:
    run = FixedRun()
    run.do(joined(0), unavailable(1))
    assert run.do(TimerExpired(at=JOIN_S, timer="join:0")) == []
    assert run.do(TimerExpired(at=WAIT_S, timer="min-nodes:0")) == []
    assert [event.finding.code for event in run.decisions if isinstance(event, FindingRaised)] == ["too-few-nodes"]
    assert run.state.ending is None
    assert run.state.timers == {}


# Drills


def test_drill_of_a_rank_follows_it_to_the_node_that_has_it() -> None:
    run = Run().whole()
    drill = FaultRequested(at=5.0, target=FaultTarget.RANK, index=1, action=FaultAction.KILL, at_step=9)
    assert run.do(drill) == [fault(drill, 1)]
    run.lose(0, 3, at=20.0)
    start, told = run.pass_("min-nodes:0", 80.0)
    assert isinstance(start, StartAttempt)
    assert told == fault(drill, 2)


def test_machine_of_a_lost_node_is_out_of_use_until_it_is_returned_for_every_controller() -> None:
    run = Run().whole()
    drill = FaultRequested(at=5.0, target=FaultTarget.NODE, index=1, action=FaultAction.REMOVE)
    assert run.do(drill) == [fault(drill, 1)]
    place = NodeId(node=1, generation=0)
    done = FaultInjected(at=6.0, node=1, requested_at=5.0, target="node", action="remove")
    assert [command.node_id for command in run.do(done) if isinstance(command, Cordon)] == [place]
    again = run.do(ControllerStarted(at=7.0, pid=2, incarnation="d"))
    assert [command.node_id for command in again if isinstance(command, Cordon)] == [place]
    back = FaultRequested(at=8.0, target=FaultTarget.NODE, index=1, action=FaultAction.RESTORE)
    assert run.do(back) == [Uncordon(node_id=place)]
    assert run.do(back) == []


# What becomes of the training


@pytest.mark.parametrize(
    ("recovery", "metrics", "batch", "samples", "rate", "factor", "left_s"),
    [
        ({}, {"global_batch": 32}, ScalingEffect.KEPT, 32, ScalingEffect.KEPT, 1.0, 360.0),
        (
            {"global_batch": GlobalBatch.SCALE},
            {"global_batch": 32},
            ScalingEffect.SCALED,
            16,
            ScalingEffect.KEPT,
            1.0,
            180.0,
        ),
        (
            {"global_batch": GlobalBatch.SCALE, "learning_rate": LearningRate.LINEAR},
            {"global_batch": 32},
            ScalingEffect.SCALED,
            16,
            ScalingEffect.SCALED,
            0.5,
            180.0,
        ),
        ({}, {}, ScalingEffect.AS_CONFIGURED, None, ScalingEffect.AS_CONFIGURED, 1.0, 180.0),
    ],
)
def test_change_says_what_becomes_of_the_training(
    recovery: dict[str, object],
    metrics: dict[str, float],
    batch: ScalingEffect,
    samples: int | None,
    rate: ScalingEffect,
    factor: float,
    left_s: float,
) -> None:
    run = Run(**recovery).whole()
    run.do(step(10, total_steps=100, **metrics))
    run.lose(0, 3, at=20.0)
    run.pass_("min-nodes:0", 80.0)
    (changed,) = run.told(WorldSizeChanged)
    assert isinstance(changed, WorldSizeChanged)
    assert (changed.global_batch, changed.samples) == (batch, samples)
    assert (changed.learning_rate, changed.learning_rate_factor) == (rate, factor)
    assert (changed.confirmed, changed.remaining_s) == (True, pytest.approx(left_s))


def test_change_before_the_first_step_promises_nothing() -> None:
    run = Run()
    run.do(joined(0), joined(1), unavailable(2), unavailable(3))
    run.pass_("min-nodes:0", WAIT_S)
    (changed,) = run.told(WorldSizeChanged)
    assert isinstance(changed, WorldSizeChanged)
    assert (changed.global_batch, changed.confirmed, changed.remaining_s) == (ScalingEffect.KEPT, False, None)


def test_hang_of_a_smaller_world_needs_only_the_ranks_it_has() -> None:
    run = Run().small()
    hangs = (replace(hung(node, at=90.0), attempt=1, rank=rank) for rank, node in enumerate((1, 2)))
    assert run.do(*hangs) == [look(1, 2, attempt=1), stop(1, 2, attempt=1)]
