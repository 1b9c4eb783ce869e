"""A run's summary, as data and as text."""

from __future__ import annotations

import msgspec

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


def test_words_of_a_recovered_run() -> None:
    assert format_summary(summarise(status_from_events(RECOVERED), logs="/runs/demo/logs", now=99)) == (
        """\
demo-abc234 succeeded: every rank finished
  4 steps, 24.0 s, 1 restart, ETTR 16.7 %

where the time went
  starting             10.0 s   41.7 %  ██████████
  training              4.0 s   16.7 %  ████
  detecting             1.0 s    4.2 %  █
  recovering            5.0 s   20.8 %  █████
  recomputing           3.0 s   12.5 %  ███  2 steps done again
  stopping              1.0 s    4.2 %  █

what failed
  after 14.0 s  node1 was lost  [node-lost]
    | its agent was ended by SIGKILL
    replace the node and restart; the next step was committed 7.0 s after the failure, 2 steps done again

logs  /runs/demo/logs"""
    )


def test_words_of_a_run_that_reports_no_steps_and_was_restarted() -> None:
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
    words = format_summary(summarise(status_from_events(log), logs="/l", now=99)).splitlines()
    assert words[3:10] == [
        "where the time went",
        "  starting                    10.0 s    0.1 %  ▏",
        "  running                 2 h 10 min   50.0 %  ████████████",
        "  possibly recomputing    2 h 10 min   49.9 %  ████████████  unless it loaded its own checkpoint",
        "  detecting                    1.0 s    0.0 %  ▏",
        "  recovering                   1.0 s    0.0 %  ▏",
        "  stopping                     1.0 s    0.0 %  ▏",
    ]
    repeats = "unless it loads its own checkpoint, it repeats the last 2 h 10 min"
    assert f"    restart in place; the program reports no steps: {repeats}" in words


def test_failed_run_shows_the_failure_once_and_what_to_do() -> None:
    log = [
        *RECOVERED[:5],
        decided(15, 0, CRASHED, "stop"),
        ShutdownDecided(at=15, outcome=Outcome.FAILED, reason=CRASHED.what, exit_code=1, finding=CRASHED),
        RunFinished(at=16, outcome=Outcome.FAILED, exit_code=1, reason=CRASHED.what),
    ]
    words = format_summary(summarise(status_from_events(log), logs="/l", now=99))
    assert words.startswith("demo-abc234 failed: rank 0 exited with code 1 (exit code 1)\n")
    assert words.count("[rank-crashed]") == 1
    assert "what to do: Mend the error and run again." in words


def test_failures_on_the_way_to_one_step_are_all_recovered_by_it() -> None:
    log = [*RECOVERED[:6], attempt(1), decided(18, 1, LOST), attempt(2), step(4, 20, attempt=2)]
    summary = summarise(status_from_events(log), logs="/l", now=30)
    assert [recovery.until_step_s for recovery in summary.recoveries] == [7, 4]
    assert summary.outcome is None
    assert format_summary(summary).startswith("demo-abc234 is not over\n")


def test_empty_log_has_a_summary() -> None:
    summary = summarise(status_from_events([]), logs="/l", now=1)
    assert (summary.job, summary.outcome, summary.recoveries) == ("", None, ())
    assert "logs  /l" in format_summary(summary)


def test_lost_replica_is_shown_with_its_cost_to_the_others() -> None:
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
    assert "; another replica continued, with a step of 1.25 s; its next step was committed" in format_summary(summary)


FULL = Finding(code="disk-full", what="no space is left", where="/run/events", remedy="Free some space there.")
ROOM = Finding(code="disk-space-recovered", what="there is room again", where="/run/events", severity=Severity.INFO)


def raised(finding: Finding, at: float) -> FindingRaised:
    return FindingRaised(at=at, finding=finding)


def test_full_disk_is_resolved_once_there_is_space() -> None:
    full = format_summary(summarise(status_from_events([RECOVERED[0], raised(FULL, 5)]), logs="/logs", now=9))
    assert "Free some space" in full
    over = [RECOVERED[0], raised(FULL, 5), raised(ROOM, 6)]
    said = format_summary(summarise(status_from_events(over), logs="/logs", now=9))
    assert "no space is left; there is room again  [disk-full]" in said
    assert "what to do" not in said
    again = format_summary(summarise(status_from_events([*over, raised(FULL, 7)]), logs="/logs", now=9))
    assert "Free some space" in again


def test_disk_filled_by_a_drill_names_the_ballast_file() -> None:
    drill = FaultInjected(at=4, node=-1, requested_at=4, target="run-dir", action="fill")
    said = format_summary(summarise(status_from_events([RECOVERED[0], drill, raised(FULL, 5)]), logs="/logs", now=9))
    assert "injected by a drill: fill run-dir" in said
    assert "what to do: Remove drill.ballast from the run's folder" in said
