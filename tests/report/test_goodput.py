"""Every second of a run has exactly one part, whatever its log looks like."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    Outcome,
    RanksStarted,
    RankState,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    ShutdownDecided,
    StepCommitted,
)
from holdfast.findings import Finding
from holdfast.report.goodput import Account, TimeCategory
from holdfast.report.status_reducer import status_from_events

LOST = Finding(code="node-lost", what="node1 was lost")


def account_of(log: list[AnyEvent], now: float | None = None) -> Account:
    return status_from_events(log).account(now)


def created(at: float) -> RunCreated:
    return RunCreated(at=at, run="demo-abc234", job={"name": "demo"})


def attempt(at: float, number: int, replica: int = 0) -> AttemptStarted:
    return AttemptStarted(
        at=at, replica=replica, attempt=number, world_size=2, master_addr="127.0.0.1", master_port=29500
    )


def ranks(at: float, number: int, replica: int = 0) -> RanksStarted:
    return RanksStarted(at=at, node=0, replica=replica, attempt=number, ranks=(RankState(rank=0, pid=7),))


def step(
    number: int, started: float, ended: float, attempt: int = 0, checkpoint_s: float = 0.0, replica: int = 0
) -> StepCommitted:
    return StepCommitted(
        at=ended, replica=replica, attempt=attempt, step=number, started=started, ended=ended, checkpoint_s=checkpoint_s
    )


def failed(failed_at: float, at: float, attempt: int = 0, replica: int = 0) -> RecoveryDecided:
    return RecoveryDecided(
        at=at, replica=replica, attempt=attempt, action="restart in place", failed_at=failed_at, finding=LOST
    )


def stop(at: float) -> ShutdownDecided:
    return ShutdownDecided(at=at, outcome=Outcome.SUCCEEDED, reason="every rank finished", exit_code=0)


def finished(at: float) -> RunFinished:
    return RunFinished(at=at, outcome=Outcome.SUCCEEDED, exit_code=0)


ONE_RECOVERY: list[AnyEvent] = [
    created(100),
    attempt(101, 0),
    ranks(102, 0),
    step(1, 110, 112),
    step(2, 112, 115, checkpoint_s=1),
    step(3, 115, 117),
    failed(118, 121),
    attempt(122, 1),
    ranks(123, 1),
    step(3, 130, 132, attempt=1),
    step(4, 132, 134, attempt=1),
    stop(134.5),
    finished(135),
]


def test_run_with_one_recovery_is_accounted_as_defined() -> None:
    account = account_of(ONE_RECOVERY)
    assert account.parts == {
        TimeCategory.STARTING: 10,
        TimeCategory.TRAINING: 2 + 2 + 2 + 2,
        TimeCategory.CHECKPOINTING: 1,
        TimeCategory.RECOMPUTING: 1 + 2,
        TimeCategory.DETECTING: 3,
        TimeCategory.RECOVERING: 9,
        TimeCategory.STOPPING: 1,
    }
    assert account.total_s == 35
    assert account.ettr == pytest.approx(8 / 35)
    assert (account.steps, account.recomputed_steps) == (4, 1)


def test_recovery_that_fails_is_recovering_then_detecting_then_recovering() -> None:
    account = account_of(
        [
            created(0),
            attempt(0, 0),
            ranks(0, 0),
            step(1, 0, 10),
            failed(10, 11),
            attempt(12, 1),
            ranks(12, 1),
            failed(15, 17, attempt=1),
            attempt(18, 2),
            ranks(18, 2),
            step(2, 20, 30, attempt=2),
            finished(30),
        ]
    )
    assert account.parts == {TimeCategory.TRAINING: 20, TimeCategory.DETECTING: 1 + 2, TimeCategory.RECOVERING: 4 + 3}


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("rank-crashed", TimeCategory.RECOMPUTING),
        ("rank-terminated-externally", TimeCategory.RECOVERING),
        ("node-preempted", TimeCategory.RECOVERING),
    ],
)
def test_ranks_that_left_between_two_steps_have_none_to_do_again(code: str, part: TimeCategory) -> None:
    left = msgspec.structs.replace(failed(12, 13), finding=Finding(code=code, what=""))
    account = account_of([created(0), attempt(0, 0), step(1, 0, 10), left])
    assert account.parts == {TimeCategory.TRAINING: 10, part: 2, TimeCategory.DETECTING: 1}


def test_job_without_steps_is_running_while_its_ranks_live() -> None:
    account = account_of(
        [created(0), attempt(1, 0), ranks(2, 0), failed(10, 11), attempt(12, 1), ranks(13, 1), stop(20), finished(21)]
    )
    assert account.parts == {
        TimeCategory.STARTING: 2,
        TimeCategory.MAYBE_RECOMPUTING: 8,
        TimeCategory.RUNNING: 7,
        TimeCategory.DETECTING: 1,
        TimeCategory.RECOVERING: 2,
        TimeCategory.STOPPING: 1,
    }
    assert account.ettr is None


def test_what_ran_without_steps_is_possibly_repeated_once_it_has_started_again() -> None:
    failing: list[AnyEvent] = [created(0), attempt(1, 0), ranks(2, 0), failed(10, 11)]
    assert account_of(failing, now=11).parts[TimeCategory.RUNNING] == 8
    again = [*failing, attempt(12, 1), ranks(13, 1), failed(33, 34, attempt=1), attempt(35, 2), ranks(36, 2)]
    account = account_of(again, now=40)
    assert (account.parts[TimeCategory.MAYBE_RECOMPUTING], account.parts[TimeCategory.RUNNING]) == (8 + 20, 4)
    assert TimeCategory.MAYBE_RECOMPUTING not in account_of([*again, step(1, 40, 41, attempt=2)], now=41).parts


def test_replica_without_steps_beside_another_repeats_nothing() -> None:
    log = [created(0), attempt(0, 0), ranks(0, 0), attempt(0, 0, replica=1), ranks(0, 0, replica=1)]
    account = account_of([*log, failed(10, 10), attempt(10, 1), ranks(10, 1), finished(20)])
    assert account.parts == {TimeCategory.RUNNING: 20}


def test_first_step_turns_running_into_starting() -> None:
    before: list[AnyEvent] = [created(0), attempt(1, 0), ranks(2, 0)]
    assert account_of(before, now=5).parts == {TimeCategory.STARTING: 2, TimeCategory.RUNNING: 3}
    assert account_of([*before, step(1, 5, 6)], now=6).parts == {TimeCategory.STARTING: 5, TimeCategory.TRAINING: 1}


def test_live_run_ends_its_account_now_and_a_step_in_hand_counts_as_what_it_will_be() -> None:
    assert account_of(ONE_RECOVERY[:6], now=119).parts[TimeCategory.TRAINING] == 2 + 2 + 2 + 2
    again = [*ONE_RECOVERY[:9], step(2, 130, 131, attempt=1)]
    assert account_of(again, now=133).parts[TimeCategory.RECOMPUTING] == 1 + 1 + 2


def test_late_step_of_a_failed_attempt_changes_nothing() -> None:
    late = step(4, 117, 119)
    assert account_of([*ONE_RECOVERY[:7], late, *ONE_RECOVERY[7:]]) == account_of(ONE_RECOVERY)


def test_failure_before_the_last_step_ended_spends_no_time_twice() -> None:
    account = account_of([created(0), attempt(0, 0), step(1, 0, 10), failed(8, 9), finished(12)])
    assert account.parts == {TimeCategory.TRAINING: 10, TimeCategory.RECOVERING: 2}


def test_cancelled_before_any_rank_starts_until_the_decision_then_stops() -> None:
    assert account_of([created(0), stop(4), finished(5)]).parts == {TimeCategory.STARTING: 4, TimeCategory.STOPPING: 1}


def test_two_replicas_have_accounts_of_their_own_and_the_run_their_mean() -> None:
    log = [
        created(0),
        attempt(0, 0),
        attempt(0, 0, replica=1),
        step(1, 2, 10),
        step(1, 4, 10, replica=1),
        finished(10),
    ]
    status = status_from_events(log)
    assert {index: one.parts for index, one in status.replica_accounts().items()} == {
        0: {TimeCategory.STARTING: 2, TimeCategory.TRAINING: 8},
        1: {TimeCategory.STARTING: 4, TimeCategory.TRAINING: 6},
    }
    assert status.account().parts == {TimeCategory.STARTING: 3, TimeCategory.TRAINING: 7}
    assert status.account().total_s == 10


def test_empty_log_has_an_empty_account() -> None:
    assert account_of([], now=5) == Account(parts={}, total_s=0.0, steps=0, recomputed_steps=0)


# Generated logs

times = st.floats(min_value=0, max_value=1000)
numbers = st.integers(min_value=0, max_value=6)
replicas = st.integers(min_value=0, max_value=1)
any_events = st.one_of(
    st.builds(attempt, times, numbers, replicas),
    st.builds(ranks, times, numbers, replicas),
    st.builds(step, numbers, times, times, numbers, times, replicas),
    st.builds(failed, times, times, numbers, replicas),
    st.builds(stop, times),
)


@given(st.lists(any_events, max_size=30), times, st.one_of(st.none(), times), times)
def test_any_log_has_parts_that_are_never_negative_and_sum_to_its_total(
    middle: list[AnyEvent], start: float, end: float | None, now: float
) -> None:
    log: list[AnyEvent] = [created(start), *middle, *([] if end is None else [finished(end)])]
    status = status_from_events(log)
    for account in (*status.replica_accounts(now).values(), status.account(now)):
        assert all(spent > 0 for spent in account.parts.values())
        assert sum(account.parts.values()) == pytest.approx(account.total_s, abs=1e-9)
        assert account.ettr is None or 0 <= account.ettr <= 1


@st.composite
def sound_logs(draw: st.DrawFn) -> list[AnyEvent]:
    """A log with a clock that only goes forward: attempts of a few steps, each but the last ended by a failure."""
    clock = 0.0

    def later() -> float:
        nonlocal clock
        clock += draw(st.integers(min_value=0, max_value=5000)) / 1000
        return clock

    log: list[AnyEvent] = [created(clock)]
    done, attempts = 0, draw(st.integers(min_value=1, max_value=4))
    for number in range(attempts):
        log += [attempt(later(), number), ranks(later(), number)]
        first = draw(st.integers(min_value=0, max_value=done))
        count = draw(st.integers(min_value=0, max_value=5))
        boundary = later()
        for one in range(first + 1, first + count + 1):
            ended = later()
            waited = draw(st.integers(min_value=0, max_value=1000)) / 1000
            log.append(step(one, boundary, ended, number, min(waited, ended - boundary)))
            boundary = ended
            done = max(done, one)
        if number < attempts - 1:
            log.append(failed(later(), later(), number))
    return [*log, stop(later()), finished(later())]


def counted_outside(log: list[AnyEvent]) -> float:
    """ETTR from the raw steps alone: the time of steps with a number never seen before, less checkpoints."""
    highest, training = 0, 0.0
    for event in log:
        if isinstance(event, StepCommitted) and event.step > highest:
            highest = event.step
            training += event.ended - event.started - event.checkpoint_s
    return training / (log[-1].at - log[0].at)


@given(sound_logs())
def test_sound_log_has_the_whole_time_and_the_ettr_of_an_outside_count(log: list[AnyEvent]) -> None:
    account = account_of(log)
    assert account.total_s == pytest.approx(log[-1].at - log[0].at, abs=1e-5)
    if account.ettr is not None:
        assert account.ettr == pytest.approx(counted_outside(log), abs=1e-4)


def test_time_of_a_restart_with_more_nodes_is_recovering_though_nothing_failed() -> None:
    account = account_of([
        created(0), attempt(1, 0), ranks(2, 0), step(1, 4, 6), step(2, 6, 8),
        attempt(11, 1), ranks(12, 1), step(3, 15, 17, attempt=1), stop(17), finished(18),
    ])  # fmt: skip
    assert account.parts == {
        TimeCategory.STARTING: 4,
        TimeCategory.TRAINING: 6,
        TimeCategory.RECOVERING: 7,
        TimeCategory.STOPPING: 1,
    }
    assert account.recomputed_steps == 0


# Programs without a Session


def clocked(number: int, started: float, ended: float, attempt: int = 0) -> StepCommitted:
    return msgspec.structs.replace(step(number, started, ended, attempt), step_clock=True)


def test_steps_without_a_session_are_training_in_the_last_attempt_and_perhaps_before() -> None:
    log: list[AnyEvent] = [created(0), attempt(1, 0), ranks(2, 0), clocked(1, 10, 20), clocked(2, 20, 30)]
    assert account_of(log).parts[TimeCategory.TRAINING] == 20
    log += [failed(30, 31), attempt(32, 1), ranks(33, 1), clocked(1, 40, 50, 1), clocked(2, 50, 55, 1)]
    account = account_of(log)
    assert (account.parts[TimeCategory.TRAINING], account.parts[TimeCategory.MAYBE_RECOMPUTING]) == (15, 20)
    assert TimeCategory.RECOMPUTING not in account.parts
    assert (account.steps, account.recomputed_steps) == (2, 0)
    assert account.ettr == pytest.approx(15 / 55)
    assert account.most_ettr == pytest.approx(35 / 55)
    assert sum(account.parts.values()) == account.total_s == 55
