"""Failures without a culprit: ranks stop, nodes stay and are checked, and each further one goes back more."""

from __future__ import annotations

import signal

import msgspec
import pytest
from msgspec.structs import replace
from tests.control.test_machine import Run, exited, gone, joined, stopped
from tests.control.test_node_checks import BROKEN, checked, reported
from tests.control.test_node_probes import probed
from tests.control.test_rollout import NEW, NEW_CODE, OLD, OLD_CODE, asked, had, leave, shipped, step
from tests.control.test_rollout import told as decided

from holdfast.control.commands import CheckNode, Command, ReplaceNode, StartAttempt, StartProbe
from holdfast.control.policy import Action, Failure, FailureKind, Verdict, decide
from holdfast.control.rollout import TRIAL_STEPS
from holdfast.control.state import CheckPhase, ProbePhase
from holdfast.events import (
    CheckpointCommitted,
    NodeChecked,
    NumericFault,
    NumericFaultObserved,
    Outcome,
    RecoveryDecided,
    TimerExpired,
    UpdateEnded,
    UpdateOutcome,
)
from holdfast.findings import Finding
from holdfast.job.spec import Recovery

RECOVERY = Recovery(max_restarts=100)
NAN = Failure(
    kind=FailureKind.NUMBERS_DAMAGED,
    at=100_000.0,
    node=1,
    machine="m7",
    attempt=4,
    rank=3,
    error="after step 50: its loss is nan",
    step=50,
    has_session=True,
    uptime_s=600.0,
)
HUNG = replace(NAN, kind=FailureKind.HUNG, error="no step after step 50")
SEGFAULT = replace(NAN, kind=FailureKind.KILLED, code=signal.SIGSEGV, error="")
NETWORK = replace(
    NAN, kind=FailureKind.CRASHED, code=1, error="RuntimeError: Connection reset by peer", is_network_error=True
)
FLOW = [Action.CHECK_NODES, Action.GO_BACK, Action.GO_BACK, Action.REPLAY, Action.STOP]


def in_a_row(failure: Failure, count: int, *, apart_s: float = 60.0) -> list[Verdict]:
    """The verdicts on failures that are alike, each on another machine and after other steps."""
    known: tuple[Failure, ...] = ()
    verdicts: list[Verdict] = []
    for number in range(count):
        changes = {"at": failure.at + number * apart_s, "step": 50 + number, "attempt": number}
        one = replace(failure, machine=f"m{number}", node=number, rank=number, **changes)  # type: ignore[arg-type]
        verdicts.append(decide(one, known, RECOVERY))
        known = (*known, one)
    return verdicts


# The table


@pytest.mark.parametrize(
    ("failure", "tolerated"),
    [(NAN, 0), (replace(NAN, kind=FailureKind.SPIKED), 0), (HUNG, 1), (SEGFAULT, 1)],
    ids=["wrong numbers", "spike", "hang", "crash"],
)
def test_failure_without_a_culprit_is_followed_by_checks_older_checkpoints_a_replay_and_then_by_the_end(
    failure: Failure, tolerated: int
) -> None:
    verdicts = in_a_row(failure, tolerated + len(FLOW))
    assert [one.action for one in verdicts] == [Action.RESTART] * tolerated + FLOW
    levels = verdicts[tolerated:]
    assert [one.check_nodes for one in levels] == [True, False, True, False, False]
    assert [one.checkpoints_back for one in levels] == [0, 1, 1, 1, 0]
    assert [one.replay_nodes for one in levels] == [False, False, False, True, False]
    assert f"failure {tolerated + 5} of this kind within recovery.restart_window_s" in levels[-1].finding.what
    assert not any(one.replace_node for one in verdicts)


def test_connection_that_is_lost_is_tolerated_twice_in_five_minutes_and_then_the_links_are_probed() -> None:
    within = in_a_row(NETWORK, 5, apart_s=70.0)
    assert [one.action for one in within] == [Action.RESTART, Action.RESTART, *[Action.CHECK_NODES] * 3]
    assert within[2].finding.what.endswith("failure 3 of this kind within 300 s")
    assert {one.checkpoints_back for one in within} == {0}
    assert {one.action for one in in_a_row(NETWORK, 5, apart_s=160.0)} == {Action.RESTART}


@pytest.mark.parametrize(
    ("explained", "unexplained"),
    [
        (replace(NAN, excused=True), NAN),
        (replace(NAN, step=0), NAN),
        (replace(HUNG, holds_up_others=True), HUNG),
        (replace(SEGFAULT, error="RuntimeError: bad shape"), SEGFAULT),
        (replace(SEGFAULT, code=signal.SIGKILL), SEGFAULT),
        (replace(NETWORK, is_network_error=False), NETWORK),
    ],
    ids=["a drill", "before the first step", "a hang with a culprit", "own words", "SIGKILL", "own error"],
)
def test_failure_that_something_explains_checks_nothing_and_does_not_count(
    explained: Failure, unexplained: Failure
) -> None:
    before = [
        replace(explained, at=NAN.at - 60.0 * number, machine=f"m{number}", step=max(0, explained.step - number))
        for number in (1, 2)
    ]
    assert not decide(explained, tuple(before[:1]), RECOVERY).check_nodes
    assert decide(unexplained, tuple(before), RECOVERY).action is decide(unexplained, (), RECOVERY).action


def test_failures_of_before_the_window_do_not_count() -> None:
    assert [one.action for one in in_a_row(NAN, 3, apart_s=3700.0)] == [Action.CHECK_NODES] * 3


def test_second_failure_rolls_updated_code_back_as_well() -> None:
    verdict = decide(replace(NAN, was_updated=True), (replace(NAN, at=NAN.at - 60.0),), RECOVERY)
    assert (verdict.action, verdict.rolls_code_back, verdict.checkpoints_back) == (Action.ROLL_BACK, True, 1)
    assert "the code before the last update" in verdict.finding.remedy
    first = decide(replace(NAN, was_updated=True), (), RECOVERY)
    assert (first.action, first.rolls_code_back) == (Action.CHECK_NODES, False)


def test_finding_does_not_name_a_first_rank_where_none_is_known() -> None:
    assert decide(NAN, (), RECOVERY).finding.what == "weights are no longer finite, and rank 3 on node1 was the first"
    doubtful = decide(replace(NAN, is_origin=False), (), RECOVERY).finding.what
    assert doubtful == "weights are no longer finite; rank 3 on node1 is among the first"


# The machine


def damaged(rank: int = 1, *, at: float = 30.0, attempt: int = 0, is_origin: bool = True) -> NumericFaultObserved:
    return NumericFaultObserved(
        at=at,
        node=rank,
        replica=0,
        attempt=attempt,
        rank=rank,
        step=5,
        fault=NumericFault.NON_FINITE,
        quantity="gradient",
        parameter_group="1 (head.bias)",
        damaged=True,
        is_origin=is_origin,
        finding=Finding(code="weights-not-finite", what="w", evidence=("after step 5: its gradient", "not finite now")),
    )


def training(nodes: int = 2) -> Run:
    """At work, after step 5."""
    run = Run(nodes=nodes, max_restarts=100).running()
    run.do(step(5))
    return run


def all_stopped(run: Run, attempt: int = 0) -> list[Command]:
    return run.do(*(stopped(node, attempt=attempt, port=6000 + node) for node in run.state.replicas[0].members))


def decision(run: Run) -> RecoveryDecided:
    (found,) = (event for event in run.decisions if isinstance(event, RecoveryDecided))
    return found


def has_checked(run: Run, node: int) -> NodeChecked:
    return checked(node, number=1, at=40.0)


def test_ranks_stop_nodes_stay_are_checked_and_probed_and_then_start_again() -> None:
    run = training()
    run.do(damaged())
    assert all_stopped(run) == [CheckNode(node=0, number=1), CheckNode(node=1, number=1)]
    assert (decision(run).action, decision(run).first_failed_rank) == (Action.CHECK_NODES, 1)
    assert decision(run).finding.evidence == ("after step 5: its gradient", "not finite now")
    assert run.do(checked(0, number=1)) == []
    assert run.do(checked(1, number=1)) == [StartProbe(replica=0, number=1, members=(0, 1))]
    run.do(probed(0, (0, 1)))
    (start,) = run.do(probed(1, (0, 1)))
    assert isinstance(start, StartAttempt)
    assert (start.attempt, start.checkpoints_back) == (1, 0)
    assert not run.state.replicas[0].examined


def test_one_node_without_gpus_is_checked_and_has_nothing_to_probe() -> None:
    run = training(nodes=1)
    run.do(damaged(0))
    assert all_stopped(run) == [CheckNode(node=0, number=1)]
    (start,) = run.do(checked(0, number=1))
    assert isinstance(start, StartAttempt)


def test_node_that_fails_its_checks_after_a_failure_is_replaced_and_its_successor_checked_too() -> None:
    run = training()
    run.do(damaged())
    all_stopped(run)
    commands = run.do(checked(0, number=1), checked(1, BROKEN, number=1))
    assert [command.node_id.node for command in commands if isinstance(command, ReplaceNode)] == [1]
    assert [finding.code for finding in reported(run)] == ["gpu-ecc-errors"]
    run.do(gone(1))
    assert run.do(joined(1, generation=1)) == [CheckNode(node=1, number=1)]
    assert run.do(checked(1, generation=1, number=1)) == [StartProbe(replica=0, number=1, members=(0, 1))]


def test_node_that_the_probe_after_a_failure_names_is_replaced() -> None:
    run = training(nodes=3)
    run.do(damaged())
    all_stopped(run)
    run.do(*(checked(node, number=1) for node in range(3)))
    run.do(probed(0, (0, 1, 2), (2,)), probed(1, (0, 1, 2)))
    commands = run.do(probed(2, (0, 1, 2)))
    assert [command.node_id.node for command in commands if isinstance(command, ReplaceNode)] == [2]


@pytest.mark.parametrize("end", ["a crash everywhere", "no report at all"])
def test_probe_without_a_result_accuses_no_node_and_ends_no_run(end: str) -> None:
    run = training()
    run.do(damaged())
    all_stopped(run)
    run.do(checked(0, number=1), checked(1, number=1))
    if end == "no report at all":
        commands = run.do(TimerExpired(at=900.0, timer="probe:0"))
    else:
        crashed = [msgspec.structs.replace(probed(node, (0, 1)), result=None, crashed=True) for node in (0, 1)]
        commands = run.do(*crashed)
    assert not [command for command in commands if isinstance(command, ReplaceNode)]
    assert [command.attempt for command in commands if isinstance(command, StartAttempt)] == [1]
    assert run.state.ending is None
    assert {node.probe for node in run.state.nodes} == {ProbePhase.PASSED}
    assert [finding.severity for finding in reported(run)] == ["warning"]


def fail_again(run: Run, attempt: int) -> list[Command]:
    """The attempt makes a step, and its weights are damaged."""
    run.do(step(5 + attempt, attempt), damaged(attempt=attempt, at=30.0 + attempt))
    return all_stopped(run, attempt)


def pass_checks(run: Run, number: int) -> StartAttempt:
    """Every node passes its checks and the probe."""
    run.do(*(checked(node, number=number) for node in (0, 1)), probed(0, (0, 1), number=number))
    (start,) = run.do(probed(1, (0, 1), number=number))
    assert isinstance(start, StartAttempt)
    return start


def test_each_further_failure_goes_one_checkpoint_back_and_then_the_run_stops() -> None:
    run = training()
    fail_again(run, 0)
    assert pass_checks(run, 1).checkpoints_back == 0
    (second,) = fail_again(run, 1)
    assert isinstance(second, StartAttempt)
    assert second.checkpoints_back == 1
    assert [type(command) for command in fail_again(run, 2)] == [CheckNode, CheckNode]
    assert pass_checks(run, 2).checkpoints_back == 1
    fail_again(run, 3)
    assert run.state.ending is not None
    assert run.state.ending.outcome is Outcome.FAILED


def test_going_back_is_not_repeated_by_a_later_start_and_not_lost_with_an_attempt_that_made_no_step() -> None:
    run = training()
    fail_again(run, 0)
    pass_checks(run, 1)
    fail_again(run, 1)
    run.do(exited(0, code=1, at=33.0, attempt=2, error="Connection closed by peer"))
    (third,) = all_stopped(run, 2)
    assert isinstance(third, StartAttempt)
    assert third.checkpoints_back == 1
    run.do(step(7, 3), exited(0, code=1, at=34.0, attempt=3, error="ValueError: x"))
    (fourth,) = all_stopped(run, 3)
    assert isinstance(fourth, StartAttempt)
    assert fourth.checkpoints_back == 0


def test_checkpoints_that_were_taken_after_the_numbers_became_wrong_are_not_resumed_from() -> None:
    run = training()
    for number in (4, 5, 9):
        run.do(CheckpointCommitted(at=20.0, node=0, replica=0, attempt=0, step=number, path=f"step-{number}"))
    run.do(step(9), damaged())  # after step 5, reported late
    all_stopped(run)
    assert any("checkpoints of steps 5, 9" in line for line in decision(run).finding.evidence)
    assert pass_checks(run, 1).checkpoints_back == 2
    run.do(exited(0, code=1, at=33.0, attempt=1, error="ValueError: x"))
    (again,) = all_stopped(run, 1)
    assert isinstance(again, StartAttempt)
    assert again.checkpoints_back == 2  # no step was made: it may not have gone back
    run.do(step(6, 2), damaged(attempt=2, at=34.0))
    (third,) = all_stopped(run, 2)
    assert isinstance(third, StartAttempt)
    assert third.checkpoints_back == 1  # those of then are gone


def applied() -> Run:
    """A run that was updated, with both attempts' steps made."""
    run = shipped(max_restarts=100)
    run.do(asked(), had(0), had(1), *leave(0), *leave(1), step(5 + TRIAL_STEPS, 1))
    assert (run.state.was_updated, run.state.code_before) == (True, OLD_CODE)
    return run


def test_second_failure_of_updated_code_returns_to_the_code_before() -> None:
    run = applied()
    run.do(damaged(attempt=1))
    all_stopped(run, 1)
    assert pass_checks(run, 1).code == NEW_CODE
    run.do(step(20, 2), damaged(attempt=2, at=50.0))
    (start,) = all_stopped(run, 2)
    assert isinstance(start, StartAttempt)
    assert (start.code, start.checkpoints_back) == (OLD_CODE, 1)
    (ended,) = decided(run, UpdateEnded)
    assert (ended.outcome, ended.digest, ended.previous_digest) == (UpdateOutcome.ROLLED_BACK, NEW, OLD)
    assert (run.state.code, run.state.was_updated) == (OLD_CODE, False)


def test_code_on_trial_that_damages_weights_is_taken_back_at_once() -> None:
    run = shipped(max_restarts=100)
    run.do(asked(), had(0), had(1), *leave(0), *leave(1), step(7, 1), damaged(attempt=1))
    (start,) = all_stopped(run, 1)
    assert isinstance(start, StartAttempt)
    assert (start.code, start.checkpoints_back) == (OLD_CODE, 0)
    assert not run.state.replicas[0].failures


def test_rank_where_it_began_is_named_before_one_that_reported_earlier() -> None:
    run = training()
    run.do(damaged(0, at=29.0, is_origin=False), damaged(1))
    all_stopped(run)
    assert decision(run).first_failed_rank == 1
    assert "rank 1 on node1 was the first" in decision(run).finding.what


def test_two_ranks_that_report_the_same_are_both_named() -> None:
    run = training()
    run.do(damaged(1, at=29.0), damaged(0))
    all_stopped(run)
    assert decision(run).first_failed_rank == 1
    assert "among the first" in decision(run).finding.what
    assert decision(run).finding.evidence[-1] == "ranks 0, 1 report it at the same time"


def test_check_of_a_node_that_was_passed_before_counts_anew() -> None:
    run = training()
    run.do(damaged())
    all_stopped(run)
    assert {node.check for node in run.state.nodes} == {CheckPhase.PENDING}
    run.do(has_checked(run, 0))
    assert run.state.nodes[0].check is CheckPhase.PASSED
