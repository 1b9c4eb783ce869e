"""Other code: nodes have it first, ranks leave for it, and what fails within its first steps is taken back."""

from __future__ import annotations

from typing import Any

import pytest
from tests.control.test_machine import Run, exited, gone, joined, sent, stopped
from tests.control.test_replicas import hung

from holdfast.control.commands import Send, StartAttempt
from holdfast.control.rollout import TRIAL_STEPS
from holdfast.control.state import ReplicaPhase
from holdfast.errors import ExitCode
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    CodeFetched,
    CodeShipped,
    ExitReason,
    FindingRaised,
    RecoveryDecided,
    StepCommitted,
    TimerExpired,
    UpdateEnded,
    UpdateOutcome,
    UpdateRequested,
)
from holdfast.findings import Finding
from holdfast.job.run_spec import CodeArchive
from holdfast.protocol.orders import CheckpointAndExit, FetchCode, FreeState, StopRanks

OLD, NEW = "0" * 64, "1" * 64
OLD_CODE, NEW_CODE = (CodeArchive(digest=digest, bytes=10, files=1, cwd=".") for digest in (OLD, NEW))
TRANSFER = CheckpointAndExit(reason="the run resumes with other code", transfer_state=True)
HANDS_OVER = Send(order=TRANSFER, nodes=(0, 1))
FETCH = FetchCode(digest=NEW)


def shipped(*, replicas: int = 1, nodes: int = 2, **recovery: int) -> Run:
    """At work, after step 5."""
    run = Run(nodes=nodes, replicas=replicas, **recovery)
    run.do(CodeShipped(at=0.0, digest=OLD, bytes=10, files=1))
    run.running()
    for replica in range(replicas):
        run.do(step(5, replica=replica))
    return run


def step(number: int, attempt: int = 0, *, replica: int = 0) -> StepCommitted:
    return StepCommitted(at=9.0, replica=replica, attempt=attempt, step=number, started=8.0, ended=9.0)


def asked(digest: str = NEW, *, after_s: float | None = 0.0) -> UpdateRequested:
    return UpdateRequested(at=10.0, digest=digest, previous_digest=OLD, bytes=10, files=1, after_s=after_s)


def had(node: int, problem: Finding | None = None) -> CodeFetched:
    return CodeFetched(at=11.0, node=node, digest=NEW, failure=problem)


def leave(node: int, attempt: int = 0, *, replica: int = 0, rank: int | None = None) -> tuple[AnyEvent, ...]:
    """A node's rank leaves as ordered, and nothing is left."""
    code = ExitCode.CHECKPOINTED_AND_EXITED
    ended = exited(node, code=code, at=12.0, attempt=attempt, replica=replica, rank=rank, left=True)
    return ended, stopped(node, attempt=attempt, port=5000 + node, replica=replica)


def on_trial() -> Run:
    """In its second attempt, with the new code."""
    run = shipped()
    run.do(asked(), had(0), had(1), *leave(0), *leave(1))
    assert run.state.replicas[0].rollout_base_step == 5
    return run


def told(run: Run, kind: type[Any]) -> list[Any]:
    return [event for event in run.decisions if isinstance(event, kind)]


def test_code_is_on_every_node_before_ranks_are_asked_to_leave() -> None:
    run = shipped()
    assert run.do(asked()) == [Send(order=FETCH, nodes=(0, 1))]
    assert run.do(had(0)) == []
    assert run.do(had(1)) == [HANDS_OVER]
    assert run.phase() is ReplicaPhase.RUNNING


def test_ranks_that_have_left_start_again_with_the_new_code() -> None:
    run = shipped()
    run.do(asked(), had(0), had(1), *leave(0))
    (start,) = run.do(*leave(1))
    assert isinstance(start, StartAttempt)
    assert (start.attempt, start.code) == (1, NEW_CODE)
    assert [event.code_digest for event in told(run, AttemptStarted)] == [NEW]
    assert told(run, RecoveryDecided) == []


def test_update_is_applied_after_its_steps_and_what_was_handed_over_is_given_back() -> None:
    run = on_trial()
    assert run.do(step(5 + TRIAL_STEPS - 1, 1)) == []
    assert run.do(step(5 + TRIAL_STEPS, 1)) == [Send(order=FreeState(replica=0), nodes=(node,)) for node in (0, 1)]
    (ended,) = told(run, UpdateEnded)
    assert (ended.outcome, ended.digest, ended.previous_digest) == (UpdateOutcome.APPLIED, NEW, OLD)
    assert (run.state.update, run.state.code) == (None, NEW_CODE)


@pytest.mark.parametrize(
    ("how", "code"),
    [(ExitReason.CODE, 1), (ExitReason.NOT_STARTED, 126), (ExitReason.SIGNAL, 11), (ExitReason.OUT_OF_MEMORY, 9)],
)
def test_code_that_fails_on_trial_is_taken_back_and_counts_for_nothing_else(how: ExitReason, code: int) -> None:
    run = on_trial()
    run.do(step(8, 1), exited(0, how=how, code=code, attempt=1), stopped(0, attempt=1))
    (start,) = run.do(stopped(1, attempt=1))
    assert isinstance(start, StartAttempt)
    assert (start.attempt, start.code) == (2, OLD_CODE)
    (ended,) = told(run, UpdateEnded)
    assert (ended.outcome, ended.step) == (UpdateOutcome.ROLLED_BACK, 8)
    assert (run.state.update, run.state.replicas[0].failures) == (None, ())


@pytest.mark.parametrize("signal", [9, 15])
def test_signal_from_outside_is_not_laid_to_code_on_trial(signal: int) -> None:
    run = on_trial()
    run.do(exited(0, how=ExitReason.SIGNAL, code=signal, attempt=1), stopped(0, attempt=1))
    (start,) = run.do(stopped(1, attempt=1))
    assert isinstance(start, StartAttempt)
    assert start.code == NEW_CODE
    assert run.state.update is not None


def test_failure_after_the_trial_is_judged_as_any_other() -> None:
    run = on_trial()
    run.do(step(5 + TRIAL_STEPS, 1), exited(0, code=1, attempt=1), stopped(0, attempt=1))
    (start,) = run.do(stopped(1, attempt=1))
    assert isinstance(start, StartAttempt)
    assert start.code == NEW_CODE
    assert len(run.state.replicas[0].failures) == 1


def test_rank_that_dies_while_it_hands_over_is_a_failure_and_the_next_start_has_the_new_code() -> None:
    run = shipped()
    run.do(asked(), had(0), had(1), exited(0, how=ExitReason.SIGNAL, code=9), stopped(0))
    (start,) = run.do(stopped(1))
    assert isinstance(start, StartAttempt)
    assert start.code == NEW_CODE
    assert len(told(run, RecoveryDecided)) == 1


def test_update_that_waits_for_a_restart_stops_nothing_and_comes_with_the_next() -> None:
    run = shipped()
    assert run.do(asked(after_s=None), had(0), had(1)) == [Send(order=FETCH, nodes=(0, 1))]
    run.do(exited(0, how=ExitReason.SIGNAL, code=9), stopped(0))
    (start,) = run.do(stopped(1))
    assert isinstance(start, StartAttempt)
    assert start.code == NEW_CODE


def test_update_with_a_deadline_comes_when_that_passes() -> None:
    run = shipped()
    run.do(asked(after_s=60.0), had(0), had(1))
    (key,) = (key for key in run.state.timers if key.startswith("update"))
    assert run.state.timers[key] == 70.0
    assert run.do(TimerExpired(at=70.0, timer=key)) == [HANDS_OVER]


def test_code_that_a_node_cannot_have_stops_nothing() -> None:
    run = shipped()
    problem = Finding(code="code-not-delivered", what="the code arrived damaged 3 times")
    assert run.do(asked(), had(0), had(1, problem)) == [Send(order=FETCH, nodes=(0, 1))]
    (ended,) = told(run, UpdateEnded)
    assert (ended.outcome, ended.finding) == (UpdateOutcome.ABANDONED, problem)
    assert run.phase() is ReplicaPhase.RUNNING
    assert run.do(had(0)) == []


def test_second_update_is_refused_once_the_first_has_begun_and_else_takes_its_place() -> None:
    run = shipped()
    run.do(asked("2" * 64, after_s=None))
    assert run.do(asked()) == [Send(order=FETCH, nodes=(0, 1))]
    run.do(had(0), had(1))
    assert run.do(asked("3" * 64)) == []
    assert [event.finding.code for event in told(run, FindingRaised)] == ["update-in-progress"]


def test_ranks_that_tell_of_no_step_are_stopped_and_it_is_said() -> None:
    run = Run()
    run.do(CodeShipped(at=0.0, digest=OLD, bytes=10, files=1))
    run.running()
    assert len(sent(run.do(asked(), had(0), had(1))[1:], StopRanks)) == 1
    assert [event.finding.code for event in told(run, FindingRaised)] == ["state-transfer-skipped"]
    run.do(exited(0, code=0, stopped=True), stopped(0), exited(1, stopped=True))
    (start,) = run.do(stopped(1))
    assert isinstance(start, StartAttempt)
    assert start.code == NEW_CODE
    assert told(run, RecoveryDecided) == []


def test_code_in_place_needs_no_fetching_and_is_never_taken_back() -> None:
    run = Run()
    run.running()
    run.do(step(5))
    assert run.do(asked("")) == [HANDS_OVER]
    run.do(*leave(0), *leave(1), exited(0, code=1, attempt=1), stopped(0, attempt=1))
    run.do(stopped(1, attempt=1))
    assert told(run, UpdateEnded) == []
    assert len(told(run, RecoveryDecided)) == 1


def test_node_that_joins_while_an_update_waits_is_told_of_it() -> None:
    run = shipped()
    run.do(asked(after_s=None), gone(1), stopped(0))
    assert Send(order=FETCH, nodes=(1,)) in run.do(joined(1, at=30.0, generation=1))


def test_replicas_leave_together_and_go_back_together() -> None:
    run = shipped(replicas=2)
    run.do(asked(), had(0))
    commands = run.do(had(1))
    assert [nodes for _, nodes in sent(commands, CheckpointAndExit)] == [(0,), (1,)]
    for replica in (0, 1):
        run.do(*leave(replica, replica=replica, rank=0))
    assert [replica.code for replica in run.state.replicas] == [NEW_CODE, NEW_CODE]
    run.do(exited(0, code=1, attempt=1, rank=0), stopped(0, attempt=1))
    assert run.phase(1) is ReplicaPhase.STOPPING
    run.do(stopped(1, attempt=1, replica=1))
    assert [replica.code for replica in run.state.replicas] == [OLD_CODE, OLD_CODE]


def test_replica_that_restarts_with_an_update_takes_the_others_along() -> None:
    run = shipped(replicas=2)
    run.do(asked(after_s=None), had(0), had(1))
    run.do(exited(0, how=ExitReason.SIGNAL, code=9, rank=0), stopped(0))
    assert run.state.replicas[0].code == NEW_CODE
    (key,) = (key for key in run.state.timers if key.startswith("update"))
    assert run.do(TimerExpired(at=20.0, timer=key)) == [Send(order=TRANSFER, nodes=(1,))]


def test_update_of_all_replicas_neither_loses_nor_regains_the_quorum() -> None:
    run = shipped(replicas=2, min_replicas=2)
    run.do(asked(), had(0), had(1), *leave(0, replica=0, rank=0), *leave(1, replica=1, rank=0))
    assert [replica.attempt for replica in run.state.replicas] == [1, 1]
    assert told(run, FindingRaised) == []


def test_replica_that_leaves_when_another_has_finished_does_not_start_again() -> None:
    run = shipped(replicas=2)
    run.do(asked(), had(0), had(1), exited(0, rank=0), stopped(0))
    assert not [one for one in run.do(*leave(1, replica=1, rank=0)) if isinstance(one, StartAttempt)]
    assert told(run, RecoveryDecided) == []
    assert run.state.ending is not None
    assert run.state.ending.exit_code == ExitCode.OK


def test_replica_suspected_of_a_hang_leaves_once_it_is_cleared() -> None:
    run = shipped(replicas=2)
    run.do(asked(), had(0), hung(1, at=10.5, last_step=5))
    assert [nodes for _, nodes in sent(run.do(had(1)), CheckpointAndExit)] == [(0,)]
    late = StepCommitted(at=12.0, replica=1, attempt=0, step=6, started=11.0, ended=12.0)
    assert [nodes for _, nodes in sent(run.do(late), CheckpointAndExit)] == [(1,)]
