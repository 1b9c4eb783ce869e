"""Every row of the policy: the failure it is for, the one it leaves alone, and how it is said."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.golden import Golden, printed

from holdfast.control.policy import CRASH_LOOP_LENGTH, FLAP_LIMIT, Action, Failure, FailureKind, Verdict, decide
from holdfast.errors import ExitCode
from holdfast.findings import Owner
from holdfast.job.spec import Recovery

RECOVERY = Recovery(max_restarts=3, restart_window_s=100.0)
CRASH = Failure(
    kind=FailureKind.CRASHED,
    at=1000.0,
    node=1,
    attempt=0,
    rank=3,
    code=7,
    error="ValueError: bad shape",
    where="rank-3.log:12",
    step=5,
    has_session=True,
    uptime_s=60.0,
)
LOSS = Failure(kind=FailureKind.NODE_LOST, at=1000.0, node=1, attempt=0, error="its agent ended", step=5)


def as_text(verdict: Verdict) -> str:
    """A verdict's finding, as `holdfast` prints it."""
    return printed(verdict.finding)


def test_program_that_cannot_be_started_stops_with_its_code() -> None:
    failure = replace(CRASH, kind=FailureKind.NOT_STARTED, code=127, step=0)
    verdict = decide(failure, (), RECOVERY)
    assert (verdict.action, verdict.exit_code) == (Action.STOP, 127)
    assert verdict.finding.code == "program-not-started"
    assert verdict.finding.owner is Owner.USER


def test_program_that_cannot_be_started_is_told_by_what_the_system_said(golden: Golden) -> None:
    errors = (
        "python: [Errno 7] Argument list too long: 'python'",
        "x: [Errno 2] No such file or directory: 'x'",
        "x: [Errno 13] Permission denied: 'x'",
        "x: [Errno 8] Exec format error: 'x'",
        "x: embedded null byte",
    )
    failure = replace(CRASH, kind=FailureKind.NOT_STARTED, code=126, step=0)
    golden(*(as_text(decide(replace(failure, error=error), (), RECOVERY)) for error in errors))


def test_error_before_first_step_stops_with_its_code_and_place(golden: Golden) -> None:
    verdict = decide(replace(CRASH, step=0), (), RECOVERY)
    assert (verdict.action, verdict.exit_code) == (Action.STOP, 7)
    golden(as_text(verdict))


def test_error_of_silent_program_stops_only_within_the_horizon() -> None:
    silent = replace(CRASH, step=0, has_session=False)
    assert decide(replace(silent, uptime_s=29.0), (), RECOVERY).action is Action.STOP
    assert decide(replace(silent, uptime_s=31.0), (), RECOVERY).action is Action.RESTART


def test_only_a_program_with_a_session_is_said_to_fail_before_its_first_step(golden: Golden) -> None:
    golden(as_text(decide(replace(CRASH, step=0, has_session=False, uptime_s=25.4), (), RECOVERY)))


def test_error_after_a_step_restarts() -> None:
    assert decide(CRASH, (), RECOVERY).action is Action.RESTART


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_of_failure_says_whose_it_is_and_ends_a_run_with_an_error(kind: FailureKind) -> None:
    verdict = decide(replace(CRASH, kind=kind), (), Recovery(max_restarts=0))
    assert verdict.action is Action.STOP
    assert verdict.exit_code > 0
    assert ("attempt 0" if kind is FailureKind.CAUSE_UNKNOWN else "rank 3 on node1") in verdict.finding.what


@pytest.mark.parametrize("kind", [FailureKind.KILLED, FailureKind.OUT_OF_MEMORY, FailureKind.HUNG])
def test_end_that_is_not_the_programs_own_restarts_before_the_first_step_too(kind: FailureKind) -> None:
    assert decide(replace(CRASH, kind=kind, code=9, step=0), (), RECOVERY).action is Action.RESTART


def test_same_failure_three_times_without_a_step_is_a_crash_loop(golden: Golden) -> None:
    verdict = decide(CRASH, (CRASH, CRASH), Recovery(max_restarts=100))
    assert (verdict.action, verdict.exit_code) == (Action.STOP, 7)
    golden(as_text(verdict))


def test_crash_loop_on_several_machines_under_one_node_number_suspects_no_node() -> None:
    now, *before = (replace(CRASH, kind=FailureKind.HUNG, machine=machine) for machine in ("m3", "m1", "m2"))
    verdict = decide(now, tuple(before), Recovery(max_restarts=100))
    assert verdict.action is Action.STOP
    assert "suspect node" not in verdict.finding.remedy
    same = tuple(replace(one, machine="m1") for one in (now, *before))
    assert "suspect node1" in decide(same[0], same[1:], Recovery(max_restarts=100)).finding.remedy


def test_crash_loop_is_seen_through_ports_and_pids_that_differ() -> None:
    before = tuple(replace(CRASH, error=f"OSError: port {port} at 0x7f{port}a") for port in (4000, 4001))
    now = replace(CRASH, error="OSError: port 4002 at 0x7f4002a")
    assert decide(now, before, Recovery(max_restarts=100)).action is Action.STOP


@pytest.mark.parametrize(
    "other",
    [
        replace(CRASH, step=4),
        replace(CRASH, code=8),
        replace(CRASH, error="KeyError: 'x'"),
        LOSS,
    ],
    ids=["a step between", "another code", "another error", "a lost node"],
)
def test_failures_that_differ_are_no_crash_loop(other: Failure) -> None:
    assert decide(CRASH, (CRASH, other), Recovery(max_restarts=100)).action is Action.RESTART


@pytest.mark.parametrize(
    ("kind", "code", "secondary", "action"),
    [
        (FailureKind.CRASHED, 7, False, Action.STOP),
        (FailureKind.KILLED, 11, False, Action.STOP),
        (FailureKind.CRASHED, 128 + 11, False, Action.STOP),
        (FailureKind.OUT_OF_MEMORY, 9, False, Action.STOP),
        (FailureKind.DISK_FULL, 1, False, Action.STOP),
        (FailureKind.CRASHED, 1, True, Action.RESTART),
        (FailureKind.KILLED, 9, False, Action.RESTART),
        (FailureKind.CRASHED, 128 + 9, False, Action.RESTART),
        (FailureKind.HUNG, 0, False, Action.GO_BACK),
    ],
)
def test_failure_on_another_rank_each_time_is_a_crash_loop_where_any_rank_may_meet_it_first(
    kind: FailureKind, code: int, secondary: bool, action: Action
) -> None:
    now, *before = (
        replace(CRASH, kind=kind, code=code, is_peer_symptom=secondary, rank=rank, node=rank, error=f"[rank{rank}]: ?")
        for rank in (0, 2, 1)
    )
    assert decide(now, tuple(before), Recovery(max_restarts=100)).action is action
    same = tuple(replace(one, rank=1, node=1) for one in (now, *before))
    assert decide(same[0], same[1:], Recovery(max_restarts=100)).action is Action.STOP


def test_end_of_unknown_cause_is_laid_to_no_node(golden: Golden) -> None:
    unknown = Failure(kind=FailureKind.CAUSE_UNKNOWN, at=1000.0, node=None, attempt=2, replica=1)
    patient = Recovery(max_restarts=9, replicas=2, restart_window_s=100.0)
    verdict = decide(unknown, (), patient)
    for earlier in range(FLAP_LIMIT + CRASH_LOOP_LENGTH):
        verdict = decide(unknown, (unknown,) * earlier, patient)
        assert not verdict.replace_node
        assert verdict.finding.where == "attempt 2 of replica 1"
        assert "node0" not in str(verdict.finding)
    assert verdict.action is Action.STOP
    golden(as_text(verdict))


def test_crash_loop_says_whether_it_keeps_to_one_rank(golden: Golden) -> None:
    before = (
        (replace(CRASH, rank=0, node=0), replace(CRASH, rank=1, node=0)),
        (CRASH, CRASH),
        (CRASH, replace(CRASH, node=0)),
    )
    golden(*(as_text(decide(CRASH, each, RECOVERY)) for each in before))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[rank0]: ValueError: no batch", "[rank13]: ValueError: no batch"),
        ("OSError: '/tmp/tmpab_dkqzw/attempt-3/x'", "OSError: '/tmp/tmpqqlmnoxz/attempt-12/x'"),
        ("E: http://[fe80::aa:bb]:8000/s", "E: http://[fe80::cc]:80/s"),
        ("E: de305d54-75b4-431b-adb2-eb6b9e546014", "E: aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"),
        ("E: at 2026-11-22 03:57:18,123", "E: at 2026-11-23 11:00:01"),
        ("E: loss is nan", "E: loss is -1.5e-05"),
        ("E: sizes [3, 4, 5]", "E: sizes [3, 4]"),
        ("E: 0x7f " + "x" * 492, "E: 0x7f3a2c10 " + "x" * 486),
    ],
)
def test_error_is_the_same_whatever_rank_path_time_or_address_it_names(one: str, other: str) -> None:
    assert replace(CRASH, error=one).signature == replace(CRASH, error=other).signature


def test_nodes_lost_again_and_again_are_no_crash_loop() -> None:
    assert decide(LOSS, (LOSS, LOSS), Recovery(max_restarts=100)).action is Action.REPLACE_NODE


def test_budget_counts_restarts_within_the_window_only() -> None:
    recent = tuple(replace(CRASH, at=at, step=int(at)) for at in (901.0, 950.0, 999.0))
    assert decide(CRASH, recent, RECOVERY).action is Action.STOP
    old = tuple(replace(CRASH, at=at, step=int(at)) for at in (900.0, 950.0, 999.0))
    assert decide(CRASH, old, RECOVERY).action is Action.RESTART


def test_no_restarts_allowed_stops_at_the_first_failure(golden: Golden) -> None:
    verdict = decide(CRASH, (), Recovery(max_restarts=0))
    assert verdict.action is Action.STOP
    golden(as_text(verdict))


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (CRASH, 7),
        (replace(CRASH, kind=FailureKind.KILLED, code=11), 139),
        (replace(CRASH, kind=FailureKind.OUT_OF_MEMORY, code=9), 137),
        (replace(CRASH, kind=FailureKind.HUNG), ExitCode.HUNG),
        (LOSS, ExitCode.NODES_LOST),
    ],
)
def test_spent_budget_exits_with_the_last_failures_code(failure: Failure, code: int) -> None:
    assert decide(failure, (), Recovery(max_restarts=0)).exit_code == code


def test_lost_node_is_replaced_and_is_the_clusters_fault() -> None:
    verdict = decide(LOSS, (), RECOVERY)
    assert verdict.action is Action.REPLACE_NODE
    assert verdict.finding.owner is Owner.CLUSTER
    assert verdict.finding.where == "node1"
    assert verdict.finding.evidence == ("its agent ended",)


def test_signal_without_a_name_is_told_by_number() -> None:
    verdict = decide(replace(CRASH, kind=FailureKind.KILLED, code=63, where=""), (), RECOVERY)
    assert verdict.finding.what == "rank 3 on node1 was ended by signal 63"
    assert verdict.finding.where == "rank 3 on node1"


def test_rank_told_to_stop_by_somebody_else_is_started_again(golden: Golden) -> None:
    left = replace(CRASH, kind=FailureKind.TERMINATED_EXTERNALLY, code=ExitCode.CHECKPOINTED_AND_EXITED, step=0)
    verdict = decide(left, (), RECOVERY)
    assert verdict.action is Action.RESTART
    golden(as_text(verdict))


def test_rank_that_only_lost_a_peer_before_its_first_step_is_started_again() -> None:
    assert decide(replace(CRASH, step=0, is_peer_symptom=True), (), RECOVERY).action is Action.RESTART


def test_early_error_after_an_attempt_that_lived_long_is_not_before_the_first_step() -> None:
    lost = replace(CRASH, kind=FailureKind.NODE_LOST, step=0, has_session=False, uptime_s=36_000.0)
    early = replace(CRASH, step=0, has_session=False, uptime_s=5.0)
    assert decide(early, (lost,), RECOVERY).action is Action.RESTART
    assert decide(early, (), RECOVERY).action is Action.STOP


def test_program_without_steps_that_lives_long_between_equal_failures_is_no_crash_loop() -> None:
    killed = replace(CRASH, kind=FailureKind.KILLED, code=9, step=0, has_session=False, uptime_s=600.0)
    assert decide(killed, (killed, killed), RECOVERY).action is not Action.STOP
    brief = replace(killed, uptime_s=5.0)
    assert decide(brief, (brief, brief), RECOVERY).action is Action.STOP


def test_crash_loop_of_a_program_without_a_session_is_not_said_to_lack_a_step(golden: Golden) -> None:
    verdicts: list[Verdict] = []
    for lived_s in (5.0, 45.0, 600.0):
        kind = FailureKind.KILLED if lived_s == 5.0 else FailureKind.CRASHED
        failure = replace(CRASH, kind=kind, step=0, has_session=False, uptime_s=lived_s, error="KeyError: 'x'")
        verdicts.append(decide(failure, (failure, failure), RECOVERY))
    assert [verdict.action for verdict in verdicts] == [Action.STOP] * 3
    golden(*map(as_text, verdicts))


def test_eviction_is_outside_the_budget_and_says_so(golden: Golden) -> None:
    evicted = replace(LOSS, kind=FailureKind.NODE_PREEMPTED, evicted=True)
    verdict = decide(evicted, (LOSS,) * 3, RECOVERY)
    assert verdict.action is Action.REPLACE_NODE
    golden(as_text(verdict))
    assert decide(LOSS, (evicted,) * 3, RECOVERY).action is Action.REPLACE_NODE
    assert decide(LOSS, (LOSS,) * 3, RECOVERY).action is Action.STOP


def test_program_without_steps_that_ends_by_the_same_error_is_a_crash_loop_however_long_it_lives(
    golden: Golden,
) -> None:
    first, second, third = (
        replace(CRASH, step=0, has_session=False, uptime_s=lived_s, rank=rank)
        for lived_s, rank in ((400.0, 0), (36_000.0, 1), (402.4, 0))
    )
    assert decide(second, (first,), RECOVERY).action is Action.RESTART
    verdict = decide(third, (first, second), RECOVERY)
    assert (verdict.action, verdict.exit_code) == (Action.STOP, 7)
    golden(as_text(verdict))


SILENT = replace(CRASH, kind=FailureKind.KILLED, code=9, step=0, has_session=False, uptime_s=7800.0)
"""A rank of a program that reports no steps."""


def test_restart_of_a_program_without_steps_says_what_it_repeats(golden: Golden) -> None:
    verdicts = [decide(failure, (), RECOVERY) for failure in (SILENT, replace(LOSS, step=0, uptime_s=7800.0))]
    assert [verdict.recomputed_s for verdict in verdicts] == [7800.0, 7800.0]
    golden(*map(as_text, verdicts))


@pytest.mark.parametrize(
    ("failure", "earlier"),
    [
        (replace(SILENT, has_session=True), ()),
        (replace(SILENT, step=3), ()),
        (replace(SILENT, attempt=1), (CRASH,)),
        (replace(SILENT, kind=FailureKind.PORT_IN_USE), ()),
        (replace(LOSS, step=0, attempt=-1, uptime_s=1.7e9), ()),
        (replace(LOSS, step=0, uptime_s=7900.0), (SILENT,)),
    ],
    ids=["a Session", "steps", "steps before", "it never ran", "no attempt so far", "the attempt was over"],
)
def test_restart_that_repeats_nothing_or_has_checkpoints_says_nothing_of_it(
    failure: Failure, earlier: tuple[Failure, ...]
) -> None:
    verdict = decide(failure, earlier, RECOVERY)
    assert verdict.recomputed_s == 0.0
    assert "checkpoint of its own" not in verdict.finding.remedy


def test_replica_that_catches_up_from_another_is_not_said_to_repeat_anything(golden: Golden) -> None:
    verdict = decide(SILENT, (), Recovery(replicas=2))
    assert verdict.recomputed_s == 0.0
    golden(as_text(verdict))


def test_errors_without_words_or_of_a_connection_are_no_crash_loop_of_a_program_that_lives_long() -> None:
    silent = replace(CRASH, step=0, has_session=False, uptime_s=864_000.0, error="")
    hub = replace(
        silent, error="requests.exceptions.ReadTimeout: Read timed out. (read timeout=10)", is_network_error=True
    )
    for one in (silent, hub):
        before = (replace(one, at=one.at - 900.0), replace(one, at=one.at - 400.0))
        assert decide(one, before, Recovery(max_restarts=100)).action is Action.RESTART
        assert decide(one, (one, one), Recovery(max_restarts=2, restart_window_s=1e9)).action is Action.STOP
    assert decide(replace(hub, uptime_s=5.0), (), RECOVERY).action is Action.STOP


def test_error_without_words_is_the_same_again_on_the_same_rank_only() -> None:
    here, there = replace(CRASH, error=""), replace(CRASH, error="", rank=0)
    assert decide(here, (here, there), RECOVERY).action is Action.RESTART
    assert decide(here, (here, here), RECOVERY).action is Action.STOP
