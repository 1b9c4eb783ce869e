"""Diagnosis of a failure from the run's own log."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.diagnose.failed_attempt import FailedAttempt, last_failure
from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    ExitReason,
    FaultInjected,
    FindingRaised,
    Outcome,
    RankExited,
    RecoveryDecided,
    ShutdownDecided,
)
from holdfast.findings import Finding, Severity
from holdfast.job.fault_attribution import ATTRIBUTION_WINDOW_S

STARTED = AttemptStarted(at=1.0, replica=0, attempt=3, world_size=2, master_addr="a", master_port=1)
FULL = Finding(code="disk-full", what="no space is left on the disk", severity=Severity.WARNING)


def decided(code: str, what: str, rank: int | None = None, at: float = 100.0) -> RecoveryDecided:
    finding = Finding(code=code, what=what)
    return RecoveryDecided(
        at=at, replica=0, attempt=2, action="restart", failed_at=at, finding=finding, first_failed_rank=rank
    )


def drill(action: str, target: str, node: int, at: float = 99.0) -> FaultInjected:
    return FaultInjected(at=at, node=node, requested_at=at, target=target, action=action)


def failure(*events: AnyEvent) -> FailedAttempt:
    failed = last_failure(events, "events.jsonl")
    assert failed is not None
    return failed


KILLED = decided("rank-killed", "rank 1 on node1 was ended by SIGKILL", 1)


def test_output_of_a_rank_of_another_replica_is_asked_for_by_its_number_among_all() -> None:
    started = msgspec.structs.replace(STARTED, replica=1, attempt=2)
    crashed = msgspec.structs.replace(decided("rank-crashed", "rank 1 of replica 1 on node3 crashed", 1), replica=1)
    fact = failure(started, crashed).fact
    assert (fact.values["rank"], fact.process.rank) == ("3", 1)


def test_last_decision_is_the_failure_with_its_rank_and_node() -> None:
    lost = decided("node-lost", "node0 was lost", at=50.0)
    failed = failure(STARTED, lost, KILLED)
    assert (failed.attempt, failed.rank, failed.event) == (2, 1, KILLED)
    assert (failed.fact.rule.classes[0], failed.fact.process.node) == (FailureClass.KILLED, "node1")


def test_evidence_of_a_decision_is_what_is_shown_of_it_and_its_words_where_it_has_none() -> None:
    evidence = ("OSError: [Errno 30] Read-only file system: '/data/a'", "/data is mounted read-only (nfs4, server:/x)")
    finding = Finding(code="read-only-file-system", what="rank 1 ended", evidence=evidence)
    fact = failure(STARTED, msgspec.structs.replace(KILLED, finding=finding)).fact
    assert (fact.rule.code, fact.rule.classes[0]) == ("run-read-only-file-system", FailureClass.STORAGE)
    assert fact.text == "; ".join(evidence)
    assert failure(STARTED, KILLED).fact.text == KILLED.finding.what


@pytest.mark.parametrize(
    ("done", "taken"),
    [
        (drill("kill", "rank 1", 1), True),
        (drill("raise", "rank 1", 1, at=100.0 - ATTRIBUTION_WINDOW_S / 2), True),
        (drill("stop", "agent", 1), True),
        (drill("kill", "rank 0", 0), False),
        (drill("hang", "collective 1", 1), False),
        (drill("clock-skew", "agent", 1), False),
        (drill("kill", "controller", -1), False),
        (drill("fill", "checkpoints", -1), False),
        (drill("kill", "rank 1", 1, at=100.0 - 2 * ATTRIBUTION_WINDOW_S), False),
    ],
)
def test_drill_is_the_cause_only_of_what_it_was_done_to(done: FaultInjected, *, taken: bool) -> None:
    fact = failure(STARTED, done, KILLED).fact
    assert ("injected by a drill" in fact.text) is taken
    assert (fact.rule.confidence is Confidence.CERTAIN) is taken


def test_only_the_first_failure_after_a_drill_is_its_own() -> None:
    killed = drill("kill", "rank 1", 1, at=49.0), drill("kill", "controller", -1, at=60.0)
    again = decided("rank-killed", "rank 1 on node1 was ended by SIGKILL", 1, at=50.0)
    assert failure(STARTED, killed[0], again, killed[1]).drill == killed[0]
    assert failure(STARTED, killed[0], again, killed[1], KILLED).drill is None


def test_disk_that_was_filled_fails_as_often_as_the_run_is_started_again() -> None:
    full = decided("disk-full", "rank 0 on node0 ended because a disk is full", 0)
    assert failure(STARTED, drill("fill", "checkpoints", -1), full, full).drill is not None


def test_filled_disk_is_the_drills() -> None:
    full = FindingRaised(at=100.0, finding=FULL)
    fact = failure(drill("fill", "run-dir", -1), full).fact
    assert "fill run-dir" in fact.text
    assert fact.rule.remedy[0].startswith("remove drill.ballast from the run's folder")


def test_rank_that_was_done_while_others_worked_is_told_and_one_that_was_stopped_is_not() -> None:
    def ended(rank: int, at: float, *, stopped: bool = False) -> RankExited:
        return RankExited(at=at, node=rank, replica=0, attempt=2, rank=rank, reason=ExitReason.CODE, stopped=stopped)

    failed = failure(STARTED, ended(1, 98.0), ended(2, 98.0, stopped=True), ended(3, 101.0), KILLED)
    (early,) = failed.exited_early
    assert (early.rule.code, early.process.rank, early.process.node) == ("run-rank-left-early", 1, "node1")


def test_run_that_ended_without_a_failed_attempt_says_what_ended_it() -> None:
    stop = ShutdownDecided(at=5.0, outcome=Outcome.FAILED, reason="full", exit_code=74, finding=FULL)
    failed = failure(STARTED, stop)
    assert (failed.attempt, failed.world_size, failed.rank, failed.event) == (3, 2, None, stop)
    assert failed.fact.rule.classes[0] is FailureClass.STORAGE


def test_nothing_failed_where_what_was_noticed_is_over() -> None:
    room = Finding(code="disk-space-recovered", what="there is room again", severity=Severity.INFO)
    raised = [FindingRaised(at=1.0, finding=finding) for finding in (FULL, room)]
    assert last_failure([STARTED, *raised], "events.jsonl") is None
    assert last_failure([STARTED], "events.jsonl") is None


@pytest.mark.parametrize(
    ("signal", "failure_class"),
    [
        ("SIGKILL", FailureClass.KILLED),
        ("SIGABRT", FailureClass.PROGRAM_ERROR),
        ("SIGSEGV", FailureClass.PROGRAM_ERROR),
    ],
)
def test_signal_that_a_program_brings_upon_itself_is_its_own_error(signal: str, failure_class: FailureClass) -> None:
    failed = failure(STARTED, decided("rank-killed", f"rank 1 on node1 was ended by {signal}", 1))
    assert failed.fact.rule.classes[0] is failure_class


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("program-not-started", "write large values to a file"),
        ("spawn-resources-exhausted", "ulimit"),
        ("code-not-delivered", "controller"),
    ],
)
def test_start_that_failed_is_told_by_its_own_reason(code: str, says: str) -> None:
    event = decided(code, "rank 0 on node0 could not be started", 0)
    finding = msgspec.structs.replace(event.finding, remedy="write large values to a file")
    (remedy,) = failure(STARTED, msgspec.structs.replace(event, finding=finding)).fact.rule.remedy
    assert says in remedy
    assert "must exist on every node" not in remedy
