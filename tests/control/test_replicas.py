"""Several replicas: who is stopped when one hangs, how long one that flaps waits, and what is said of too few."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.control.test_machine import GRACE_S, Run, exited, joined, killed, look, sent, stopped

from holdfast.control.commands import ReplaceNode, Send, StartAttempt
from holdfast.control.policy import BACK_OFF_S, FLAP_LIMIT, HANG_VERDICT_S, PROGRESS_STEPS
from holdfast.control.state import ReplicaPhase, Timer
from holdfast.events import (
    AnyEvent,
    FindingRaised,
    GroupCollectives,
    NodePreemptionNotice,
    NodeTerminated,
    NodeUnavailable,
    Outcome,
    RankHung,
    RanksDrained,
    RecoveryDecided,
    ShutdownDecided,
    StepCommitted,
    TimerExpired,
)
from holdfast.job.step_timeouts import AUTO_FACTOR, EARLY_MARGIN_S, EARLY_STEPS, NON_STEP_FACTOR
from holdfast.protocol.orders import AnnounceReplicaDown, StopRanks
from holdfast.protocol.wait_frames import FOR_REPLICAS

WAITING = f"ReplicaGroup._wait_arrival{FOR_REPLICAS} (holdfast/train/ft/replica_group.py:2)"
WITHIN = "all_reduce (torch/distributed/distributed_c10d.py:2)"


def hung(
    replica: int,
    *,
    at: float = 30.0,
    state: str = "S",
    top_frame: str = WAITING,
    last_step: int = 3,
    attempt: int = 0,
    rank: int = 0,
    waited_s: float = 9.0,
) -> RankHung:
    return RankHung(
        at=at,
        node=replica,
        replica=replica,
        attempt=attempt,
        rank=rank,
        last_step=last_step,
        last_step_at=at - 9,
        waited_s=waited_s,
        process_state=state,
        top_frame=top_frame,
    )


def step(replica: int, number: int = 3, *, attempt: int = 0, at: float = 20.0) -> StepCommitted:
    return StepCommitted(at=at, replica=replica, attempt=attempt, step=number, started=at - 1, ended=at)


def stops(commands: list[object]) -> list[int]:
    return [order.replica for order, _ in sent(commands, StopRanks)]


def training(replicas: int = 2, **recovery: float | str) -> Run:
    run = Run(nodes=replicas, replicas=replicas, **recovery).running()
    run.do(*(step(replica) for replica in range(replicas)))
    return run


def codes(run: Run) -> list[str]:
    return [event.finding.code for event in run.decisions if isinstance(event, FindingRaised)]


@pytest.mark.parametrize("word", [hung(1, state="T", top_frame=""), hung(1, top_frame="sleep (train.py:3)")])
def test_replica_that_blocks_the_others_is_evicted_immediately_and_they_continue(word: RankHung) -> None:
    run = training()
    assert stops(run.do(hung(0))) == []
    assert stops(run.do(word)) == [1]
    assert run.phase(0) is ReplicaPhase.RUNNING
    assert Timer.HANG_VERDICT.key(0) not in run.state.timers


def test_replica_that_waits_for_no_other_is_evicted_once_all_its_ranks_have_reported() -> None:
    run = Run(nodes=4, replicas=2).running()
    run.do(*(step(replica) for replica in range(2)))
    assert stops(run.do(hung(0, rank=0), hung(1, rank=0, top_frame=WITHIN))) == []
    assert stops(run.do(hung(0, rank=1, top_frame=WITHIN))) == []
    assert stops(run.do(hung(1, rank=1, top_frame=WITHIN))) == [1]
    assert run.phase(0) is ReplicaPhase.RUNNING


@pytest.mark.parametrize(
    ("top_frame", "stopped"), [("synchronize (torch/cuda/__init__.py:9)", [1]), (WAITING, []), ("", [])]
)
def test_replica_whose_flight_recorders_name_a_rank_is_evicted_unless_that_rank_waits_for_other_replicas(
    top_frame: str, stopped: list[int]
) -> None:
    run = Run(nodes=4, replicas=2).running()
    run.do(*(step(replica) for replica in range(2)))
    waits = GroupCollectives(group="0", enqueued=8, completed=7, pending=8)
    free = GroupCollectives(group="0", enqueued=7, completed=7)
    inside = replace(hung(1, rank=0, top_frame=""), collectives=(waits,))
    assert stops(run.do(inside)) == []
    assert stops(run.do(replace(hung(1, rank=1, top_frame=top_frame), collectives=(free,)))) == stopped


def test_replica_of_which_no_stacks_are_known_gets_its_time() -> None:
    assert stops(training().do(hung(1, top_frame=""))) == []


def test_replica_that_is_reported_just_after_the_one_that_it_waits_for_continues() -> None:
    run = training()
    assert stops(run.do(hung(1, state="T"))) == [1]
    assert stops(run.do(hung(0, top_frame="Loop.somewhere (train.py:3)"))) == []
    judge = TimerExpired(at=30.0 + HANG_VERDICT_S, timer=Timer.HANG_VERDICT.key(0))
    assert stops(run.do(judge)) == []
    assert run.phase(0) is ReplicaPhase.RUNNING


def test_lagging_replica_is_evicted_when_all_replicas_wait() -> None:
    run = training(3)
    assert stops(run.do(hung(0), hung(1, last_step=2), hung(2))) == []
    judge = TimerExpired(at=30.0 + HANG_VERDICT_S, timer=Timer.HANG_VERDICT.key(0))
    assert stops(run.do(judge)) == [1]
    assert [run.phase(index) for index in (0, 2)] == [ReplicaPhase.RUNNING] * 2


def test_replica_that_waits_for_one_on_its_way_back_is_not_hung() -> None:
    run = training(3)
    run.do(killed(1, rank=0, replica=1), stopped(1, replica=1))
    judge = TimerExpired(at=30.0 + HANG_VERDICT_S, timer=Timer.HANG_VERDICT.key(0))
    assert stops(run.do(hung(0), judge)) == []
    assert run.phase(0) is ReplicaPhase.RUNNING


@pytest.mark.parametrize("top_frame", ["sleep (train.py:3)", WITHIN])
def test_replica_that_hangs_while_another_returns_is_evicted_after_a_while(top_frame: str) -> None:
    run = training(3)
    run.do(killed(1, rank=0, replica=1), stopped(1, replica=1))
    assert stops(run.do(hung(0, top_frame=top_frame))) == []
    run.do(TimerExpired(at=30.0 + HANG_VERDICT_S, timer=Timer.HANG_VERDICT.key(0)))
    assert stops(run.do(hung(2, at=52.0, waited_s=EARLY_MARGIN_S + 1))) == []
    assert stops(run.do(hung(0, at=52.0, top_frame=top_frame, waited_s=EARLY_MARGIN_S + 1))) == [0]


def test_replica_that_waits_for_one_that_may_compile_again_is_not_hung() -> None:
    run = training()
    run.do(*(step(0, number) for number in range(4, 4 + EARLY_STEPS)))
    judge = TimerExpired(at=30.0 + HANG_VERDICT_S, timer=Timer.HANG_VERDICT.key(0))
    assert stops(run.do(hung(0), judge)) == []
    assert run.phase(0) is ReplicaPhase.RUNNING
    assert stops(run.do(hung(0, top_frame="Loop.somewhere (train.py:3)"))) == [0]


def test_two_that_wait_for_each_other_in_their_first_step_are_told_when_both_were_seen_to() -> None:
    run = Run(nodes=2, replicas=2).running()
    run.do(hung(0, at=600.0, waited_s=600.0), TimerExpired(at=608.0, timer=Timer.HANG_VERDICT.key(0)))
    assert run.phase(0) is ReplicaPhase.RUNNING
    run.do(hung(1, at=610.0, waited_s=600.0), hung(0, at=615.0, waited_s=615.0))
    run.do(TimerExpired(at=618.0, timer=Timer.HANG_VERDICT.key(1)))
    assert [run.phase(each) for each in (0, 1)].count(ReplicaPhase.STOPPING) == 1


def test_wait_for_a_replica_that_may_compile_again_has_an_end() -> None:
    run = training(step_timeout_s=9)
    judge = TimerExpired(at=30.0 + HANG_VERDICT_S, timer=Timer.HANG_VERDICT.key(0))
    assert stops(run.do(hung(0, waited_s=2 * NON_STEP_FACTOR * 9), judge)) == [0]


@pytest.mark.parametrize(
    ("deadline_s", "times", "more_s"), [(9, 1, NON_STEP_FACTOR * 9), ("auto", AUTO_FACTOR, EARLY_MARGIN_S)]
)
def test_replica_that_never_opens_its_session_is_dumped_and_evicted(
    deadline_s: float | str, times: float, more_s: float
) -> None:
    run = training(step_timeout_s=deadline_s)
    run.do(killed(1, rank=0, replica=1), stopped(1, replica=1))
    took_s = 20.0 - run.state.replicas[0].started_at
    due = run.state.timers[Timer.FIRST_STEP.key(1)]
    assert due == 11.0 + times * took_s + more_s
    late = TimerExpired(at=due, timer=Timer.FIRST_STEP.key(1))
    assert run.do(late) == [look(1, replica=1, attempt=1)]
    assert stops(run.do(hung(1, at=due, state="T", attempt=1, last_step=-1))) == [1]


def test_replica_that_has_taken_a_step_is_not_looked_at() -> None:
    run = training(step_timeout_s=9)
    run.do(killed(1, rank=0, replica=1), stopped(1, replica=1), step(1, 4, attempt=1, at=30.0))
    assert Timer.FIRST_STEP.key(1) not in run.state.timers


def test_program_that_tells_of_no_step_may_take_as_long_as_it_likes() -> None:
    run = Run(nodes=2, replicas=2, step_timeout_s=9).running()
    run.do(killed(1, rank=0, replica=1), stopped(1, replica=1))
    assert Timer.FIRST_STEP.key(1) not in run.state.timers


def test_replica_that_steps_after_it_was_reported_is_not_hung() -> None:
    run = training()
    run.do(hung(0), step(0, 4, at=31.0))
    assert run.phase(0) is ReplicaPhase.RUNNING
    assert Timer.HANG_VERDICT.key(0) not in run.state.timers


def test_replicas_that_are_too_few_say_so_and_wait_unharmed() -> None:
    run = training(2, min_replicas=2)
    run.do(killed(1, rank=0, replica=1))
    assert codes(run) == ["replica-quorum-lost"]
    run.do(killed(0, rank=0))
    assert codes(run) == []
    run.do(stopped(0))
    assert codes(run) == []
    assert stops(run.do(hung(0, state="T", attempt=1))) == []
    run.do(stopped(1, replica=1))
    assert codes(run) == ["replica-quorum-regained"]


def test_replica_that_hangs_after_another_has_finished_is_stopped() -> None:
    run = training(2, min_replicas=2)
    run.do(exited(0, replica=0, rank=0), stopped(0))
    assert stops(run.do(hung(1, state="T"))) == [1]
    run.do(stopped(1, replica=1))
    assert outcome(run) is Outcome.SUCCEEDED


def test_replica_that_flaps_waits_longer_each_time_and_gets_another_node() -> None:
    run = training(2)
    for attempt in (0, 1):
        run.do(killed(1, rank=0, replica=1, attempt=attempt, at=21.0 + attempt))
        started = run.do(stopped(1, replica=1, attempt=attempt))
        assert [type(one) for one in started if isinstance(one, StartAttempt)] == [StartAttempt] * (attempt == 0)
    assert run.state.timers[Timer.BACK_OFF.key(1)] == pytest.approx(11.0 + BACK_OFF_S)
    waited = run.do(TimerExpired(at=40.0, timer=Timer.BACK_OFF.key(1)))
    assert [one.attempt for one in waited if isinstance(one, StartAttempt)] == [2]
    assert run.phase(0) is ReplicaPhase.RUNNING


def test_replica_that_made_steps_since_it_failed_is_tried_again_at_once_and_moves_all_the_same() -> None:
    run = training(2, max_restarts=9)
    for attempt in range(FLAP_LIMIT):
        began = run.state.replicas[1].highest_step
        run.do(*(step(1, began + 1 + each, attempt=attempt) for each in range(PROGRESS_STEPS)))
        run.do(killed(1, rank=0, replica=1, attempt=attempt, at=21.0 + attempt))
        commands = run.do(stopped(1, replica=1, attempt=attempt))
        assert Timer.BACK_OFF.key(1) not in run.state.timers
        moves = attempt == FLAP_LIMIT - 1
        assert [one.attempt for one in commands if isinstance(one, StartAttempt)] == ([] if moves else [attempt + 1])
        assert [one.node_id.node for one in commands if isinstance(one, ReplaceNode)] == ([1] if moves else [])


def test_third_failure_in_a_row_replaces_the_node_and_waits_for_it() -> None:
    run = training(2, max_restarts=9)
    for attempt in (0, 1):
        run.do(killed(1, rank=0, replica=1, attempt=attempt, at=21.0 + attempt), stopped(1, replica=1, attempt=attempt))
        run.do(TimerExpired(at=40.0, timer=Timer.BACK_OFF.key(1)))
    run.do(killed(1, rank=0, replica=1, attempt=2, at=50.0))
    commands = run.do(stopped(1, replica=1, attempt=2))
    assert [one.node_id.node for one in commands if isinstance(one, ReplaceNode)] == [1]
    assert run.do(TimerExpired(at=60.0, timer=Timer.BACK_OFF.key(1))) == []
    started = run.do(joined(1, generation=1, incarnation="new", at=61.0))
    assert [one.attempt for one in started if isinstance(one, StartAttempt)] == [3]
    assert run.phase(0) is ReplicaPhase.RUNNING


def test_failure_of_another_replica_than_the_first_is_told_with_it() -> None:
    run = training()
    run.do(killed(1, rank=0, replica=1), stopped(1, replica=1), killed(0, rank=0), stopped(0))
    told = [event.finding.what for event in run.decisions if isinstance(event, RecoveryDecided)]
    assert told == ["rank 0 of replica 1 on node1 was ended by SIGKILL", "rank 0 on node0 was ended by SIGKILL"]


def test_replica_lost_after_another_has_finished_is_left() -> None:
    run = training()
    run.do(exited(0, replica=0, rank=0), stopped(0))
    run.do(killed(1, rank=0, replica=1))
    run.do(stopped(1, replica=1))
    assert isinstance(run.decisions[0], RecoveryDecided)
    assert run.state.ending is not None
    assert run.state.ending.outcome is Outcome.SUCCEEDED


def outcome(run: Run) -> Outcome | None:
    return run.state.ending and run.state.ending.outcome


def test_replica_that_comes_too_late_is_stopped_and_nothing_has_failed() -> None:
    run = training()
    run.do(killed(1, rank=0, replica=1), stopped(1, replica=1))
    assert stops(run.do(exited(0, replica=0, rank=0), stopped(0))) == [1]
    run.do(exited(1, replica=1, rank=0, attempt=1, code=143, stopped=True), stopped(1, replica=1, attempt=1))
    assert [type(event) for event in run.decisions] == [ShutdownDecided]
    assert outcome(run) is Outcome.SUCCEEDED


def test_replica_that_never_started_keeps_no_finished_training_from_ending() -> None:
    run = Run(nodes=2, replicas=2)
    run.do(joined(0), step(0), exited(0, replica=0, rank=0), stopped(0))
    assert outcome(run) is Outcome.SUCCEEDED


def test_replica_of_a_program_without_steps_may_start_until_its_wait_for_nodes_is_over() -> None:
    finished = (exited(0, replica=0, rank=0), stopped(0))
    run = Run(nodes=2, replicas=2)
    run.do(joined(0), *finished)
    assert outcome(run) is None
    started = run.do(joined(1))
    assert [one.replica for one in started if isinstance(one, StartAttempt)] == [1]
    waits = Timer.MIN_NODES.key(1)
    over = TimerExpired(at=60.0, timer=waits)
    for events in ((over, *finished), (*finished, over)):
        run = Run(nodes=2, replicas=2)
        run.do(joined(0), NodeUnavailable(at=1.0, node=1, generation=0, reason="full"), *events)
        assert outcome(run) is Outcome.SUCCEEDED


def test_node_that_was_out_of_reach_hears_who_was_lost() -> None:
    run = training()
    run.do(killed(1, rank=0, replica=1))
    commands = run.do(joined(0, attempt=0))
    assert Send(order=AnnounceReplicaDown(replica=1, attempt=0), nodes=(0,)) in commands


@pytest.mark.parametrize(
    "word",
    [
        RanksDrained(at=31.0, node=1, replica=1, attempt=0),
        exited(1, rank=0, replica=1, code=75, stopped=True),
    ],
)
def test_replica_whose_node_is_about_to_go_may_take_its_step_and_the_others_hear_when_it_has(word: AnyEvent) -> None:
    run = training(2)
    leaving = NodePreemptionNotice(at=30.0, node=1, grace_s=GRACE_S)
    told = run.do(leaving)
    assert stops(told) == [1]
    assert not sent(told, AnnounceReplicaDown)
    assert run.state.rendezvous_by_replica[1] != ""
    told = run.do(word)
    assert [(order.replica, nodes) for order, nodes in sent(told, AnnounceReplicaDown)] == [(1, (0,))]
    assert run.state.rendezvous_by_replica[1] == ""
    told = run.do(exited(1, rank=0, replica=1, code=75, stopped=True), stopped(1, replica=1))
    assert not sent(told, AnnounceReplicaDown)


def test_replica_that_hangs_is_not_waited_for_when_its_node_is_about_to_go() -> None:
    run = training(2)
    run.do(hung(1))
    told = run.do(NodePreemptionNotice(at=31.0, node=1, grace_s=GRACE_S))
    assert [order.replica for order, _ in sent(told, AnnounceReplicaDown)] == [1]


def test_replica_whose_node_is_gone_before_it_has_left_is_lost_to_the_others_at_once() -> None:
    run = training(3)
    run.do(NodePreemptionNotice(at=30.0, node=1, grace_s=GRACE_S))
    told = run.do(NodeTerminated(at=31.0, node=1, generation=0, reason="gone"))
    assert [(order.replica, nodes) for order, nodes in sent(told, AnnounceReplicaDown)] == [(1, (0, 2))]
