"""A run's summary, as data and as text."""

from __future__ import annotations

import msgspec
from tests.golden import Golden

from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    CodeShipped,
    FaultInjected,
    FindingRaised,
    Outcome,
    RanksStarted,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    ShutdownDecided,
    StepCommitted,
)
from holdfast.findings import Finding, Severity
from holdfast.report.run_summary import format_summary, summarise
from holdfast.report.status_reducer import status_from_events

LOST = Finding(code="node-lost", what="node1 was lost", evidence=("its agent was ended by SIGKILL",))
CRASHED = Finding(code="rank-crashed", what="rank 0 exited with code 1", remedy="Mend the error and run again.")


def attempt(number: int) -> AttemptStarted:
    return AttemptStarted(at=0, replica=0, attempt=number, world_size=2, master_addr="127.0.0.1", master_port=29500)


def step(number: int, started: float, attempt: int = 0) -> StepCommitted:
    return StepCommitted(at=started + 1, replica=0, attempt=attempt, step=number, started=started, ended=started + 1)


def decided(at: float, attempt: int, finding: Finding, action: str = "restart in place") -> RecoveryDecided:
    return RecoveryDecided(at=at, replica=0, attempt=attempt, action=action, failed_at=at - 1, finding=finding)


RECOVERED: list[AnyEvent] = [
    RunCreated(at=0, run="demo-abc234", job={"name": "demo"}),
    attempt(0),
    step(1, 10),
    step(2, 11),
    step(3, 12),
    decided(15, 0, LOST, "replace the node and restart"),
    attempt(1),
    step(2, 20, attempt=1),
    step(3, 21, attempt=1),
    step(4, 22, attempt=1),
    ShutdownDecided(at=23, outcome=Outcome.SUCCEEDED, reason="every rank finished", exit_code=0),
    RunFinished(at=24, outcome=Outcome.SUCCEEDED, exit_code=0),
]


def test_shipped_code_is_named_by_the_start_of_its_digest() -> None:
    shipped = CodeShipped(at=0, digest="5f70" * 16, bytes=1, files=1)
    summary = summarise(status_from_events([RECOVERED[0], shipped, *RECOVERED[1:]]), logs="/logs", now=24)
    assert "\ncode  5f705f705f70, shipped\nlogs  /logs" in format_summary(summary)
    assert "code  " not in format_summary(summarise(status_from_events(RECOVERED), logs="/logs", now=24))


def test_recovery_has_the_failure_and_its_cost() -> None:
    summary = summarise(status_from_events(RECOVERED), logs="/runs/demo/logs", now=99)
    assert (summary.outcome, summary.exit_code, summary.restarts) == (Outcome.SUCCEEDED, 0, 1)
    (recovery,) = summary.recoveries
    assert (recovery.after_s, recovery.step, recovery.resumed_step) == (14, 3, 2)
    assert (recovery.recomputed_steps, recovery.until_step_s) == (2, 7)
    assert summary.account.total_s == 24


def test_words_of_a_recovered_run(golden: Golden) -> None:
    golden(format_summary(summarise(status_from_events(RECOVERED), logs="/runs/demo/logs", now=99)))


def test_words_of_a_run_that_reports_no_steps_and_was_restarted(golden: Golden) -> None:
    log = [
        RECOVERED[0],
        attempt(0),
        RanksStarted(at=10, node=0, replica=0, attempt=0, ranks=()),
        msgspec.structs.replace(decided(7811, 0, LOST), recomputed_s=7800.0),
        attempt(1),
        RanksStarted(at=7812, node=0, replica=0, attempt=1, ranks=()),
        ShutdownDecided(at=15622, outcome=Outcome.SUCCEEDED, reason="every rank finished", exit_code=0),
        RunFinished(at=15623, outcome=Outcome.SUCCEEDED, exit_code=0),
    ]
    golden(format_summary(summarise(status_from_events(log), logs="/l", now=99)))


def test_failed_run_shows_the_failure_once_and_what_to_do(golden: Golden) -> None:
    log = [
        *RECOVERED[:5],
        decided(15, 0, CRASHED, "stop"),
        ShutdownDecided(at=15, outcome=Outcome.FAILED, reason=CRASHED.what, exit_code=1, finding=CRASHED),
        RunFinished(at=16, outcome=Outcome.FAILED, exit_code=1, reason=CRASHED.what),
    ]
    golden(format_summary(summarise(status_from_events(log), logs="/l", now=99)))


def test_failures_on_the_way_to_one_step_are_all_recovered_by_it(golden: Golden) -> None:
    log = [*RECOVERED[:6], attempt(1), decided(18, 1, LOST), attempt(2), step(4, 20, attempt=2)]
    summary = summarise(status_from_events(log), logs="/l", now=30)
    assert [recovery.until_step_s for recovery in summary.recoveries] == [7, 4]
    assert summary.outcome is None
    golden(format_summary(summary))


def test_empty_log_has_a_summary() -> None:
    summary = summarise(status_from_events([]), logs="/l", now=1)
    assert (summary.job, summary.outcome, summary.recoveries) == ("", None, ())
    assert "logs  /l" in format_summary(summary)


def test_lost_replica_is_shown_with_its_cost_to_the_others(golden: Golden) -> None:
    def of(replica: int, number: int, started: float, took_s: float, attempt: int = 0) -> StepCommitted:
        ended = started + took_s
        return StepCommitted(at=ended, replica=replica, attempt=attempt, step=number, started=started, ended=ended)

    lost = RecoveryDecided(at=13.3, replica=1, attempt=0, action="restart in place", failed_at=12.5, finding=CRASHED)
    events: list[AnyEvent] = [
        RECOVERED[0],
        *(of(replica, 1, 10, 1.0) for replica in (0, 1)),
        *(of(replica, 2, 11, 1.0) for replica in (0, 1)),
        of(0, 3, 12, 1.25),
        lost,
        of(0, 4, 13.25, 1.0),
        of(1, 5, 14.25, 1.0, attempt=1),
    ]
    summary = summarise(status_from_events(events), logs="/logs", now=24)
    (recovery,) = summary.recoveries
    assert recovery.other_replica_step_s == 1.25
    golden(format_summary(summary))


FULL = Finding(code="disk-full", what="no space is left", where="/run/events", remedy="Free some space there.")
ROOM = Finding(code="disk-space-recovered", what="there is room again", where="/run/events", severity=Severity.INFO)


def raised(finding: Finding, at: float) -> FindingRaised:
    return FindingRaised(at=at, finding=finding)


def test_full_disk_is_resolved_once_there_is_space(golden: Golden) -> None:
    drill = FaultInjected(at=4, node=-1, requested_at=4, target="run-dir", action="fill")
    full, over = raised(FULL, 5), [raised(FULL, 5), raised(ROOM, 6)]
    logs = ([full], over, [*over, raised(FULL, 7)], [drill, full])
    golden(*(format_summary(summarise(status_from_events([RECOVERED[0], *log]), logs="/logs", now=9)) for log in logs))
