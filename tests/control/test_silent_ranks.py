"""Ranks that do nothing hang only together: one that works, in an evaluation or a checkpoint, may keep them waiting."""

from __future__ import annotations

import msgspec
from tests.control.test_machine import Run, hung, joined, left, look, stop, stopped

from holdfast.control.policy import HANG_VERDICT_S
from holdfast.control.state import ReplicaPhase
from holdfast.events import CheckpointCommitted, RankHung, RanksHung, RecoveryDecided, StepCommitted, TimerExpired


def silent(node: int, *, at: float = 30.0, silent_s: float = 1.0, in_collective: bool = True) -> RankHung:
    return msgspec.structs.replace(
        hung(node, at=at),
        last_step_at=at - silent_s,
        waited_s=silent_s,
        waits_for_peers=in_collective,
        top_frame="all_reduce (torch/distributed/distributed_c10d.py:3007)" if in_collective else "read (data.py:3)",
        unless_others_work=True,
        has_session=False,
    )


def test_one_silent_rank_changes_nothing_however_long_the_other_works() -> None:
    run = Run().running()
    for at in (30.0, 45.0, 75.0):
        assert run.do(silent(0, at=at, silent_s=at - 29.0)) == []
    assert run.phase() is ReplicaPhase.RUNNING
    assert run.state.timers == {}


def test_all_silent_ranks_are_stopped_at_once_if_one_waits_for_others() -> None:
    run = Run().running()
    run.do(silent(0))
    assert run.do(silent(1, at=30.1, in_collective=False)) == [stop(0, 1)]
    run.do(stopped(0), stopped(1))
    (recovery,) = [event for event in run.decisions if isinstance(event, RecoveryDecided)]
    assert (recovery.finding.code, recovery.first_failed_rank) == ("rank-hung", 1)


def test_ranks_whose_node_was_cut_off_get_time_to_continue() -> None:
    run = Run().running()
    run.do(silent(0), left(1, at=31.0), joined(1, at=40.0, attempt=0))
    assert run.do(silent(1, at=30.1)) == [look(0, 1)]
    assert run.state.timers == {"hang-verdict:0": 40.0 + HANG_VERDICT_S}
    run.do(StepCommitted(at=40.5, replica=0, attempt=0, step=8, started=29.0, ended=40.5))
    assert (run.phase(), run.state.timers) == (ReplicaPhase.RUNNING, {})


def test_node_that_returns_while_a_hang_is_judged_gets_as_much_time() -> None:
    run = Run().running()
    run.do(hung(0, at=30.0), left(1, at=31.0), joined(1, at=37.5, attempt=0))
    assert run.state.timers["hang-verdict:0"] == 37.5 + HANG_VERDICT_S


def test_node_that_connects_again_and_again_delays_a_verdict_no_longer_than_a_lost_one() -> None:
    run = Run().running()
    run.do(hung(0, at=30.0))
    for at in (40.0, 60.0, 74.0, 80.0):
        run.do(left(1, at=at - 1.0), joined(1, at=at, attempt=0))
    assert run.state.timers["hang-verdict:0"] == 30.0 + run.machine.job.recovery.node_grace_s + HANG_VERDICT_S


def test_suspicion_that_a_step_ends_has_cost_nothing() -> None:
    run = Run().running()
    saved = CheckpointCommitted(at=30.5, node=0, replica=0, attempt=0, step=7, path="p", took_s=0.1)
    run.do(hung(0, at=30.0), saved, StepCommitted(at=32.0, replica=0, attempt=0, step=8, started=29.0, ended=32.0))
    assert run.phase() is ReplicaPhase.RUNNING
    assert run.state.replicas[0].checkpoints == (7,)


def test_ranks_that_do_not_continue_after_a_cut_are_stopped() -> None:
    run = Run().running()
    run.do(silent(0), left(1, at=31.0), joined(1, at=40.0, attempt=0), silent(1, at=30.1))
    assert run.do(TimerExpired(at=48.0, timer="hang-verdict:0")) == [stop(0, 1)]


def test_ranks_that_all_rest_outside_collectives_are_left_alone() -> None:
    run = Run().running()
    assert run.do(silent(0, in_collective=False), silent(1, in_collective=False)) == []


def test_report_from_before_another_ranks_step_does_not_count() -> None:
    run = Run().running()
    run.do(silent(0, at=30.0))
    assert run.do(silent(1, at=40.0, silent_s=2.0)) == []
    assert run.do(silent(0, at=41.0, silent_s=3.0)) == [stop(0, 1)]


def test_report_that_needs_no_other_counts_those_of_silent_ranks() -> None:
    run = Run().running()
    run.do(silent(0))
    assert run.do(hung(1, at=30.5)) == [stop(0, 1)]


def test_many_silent_ranks_are_one_event_and_hang_together() -> None:
    run = Run(nodes=3).running()
    many = RanksHung(at=30.0, replica=0, attempt=0, ranks=((1, 2),), unless_others_work=True, last_step_at=29.0)
    assert run.do(many) == []
    assert run.do(silent(0)) == [stop(0, 1, 2)]


def test_ranks_that_wait_for_ten_minutes_have_those_without_steps_inspected() -> None:
    run = Run().running()
    assert run.do(silent(0, at=700.0, silent_s=650.0)) == [look(0, 1)]


def test_clocked_steps_leave_the_numbers_of_a_session_alone() -> None:
    run = Run().running()
    run.do(StepCommitted(at=9.0, replica=0, attempt=0, step=12, steps=12, started=1.0, ended=9.0, step_clock=True))
    (replica,) = run.state.replicas
    assert (replica.highest_step, replica.attempt_steps) == (0, 12)
    assert run.state.longest_first_step_s == 0.0
