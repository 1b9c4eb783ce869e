"""The report names the ranks that were the slowest, and step times across ranks, in every form."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.report.test_report_page import Page, recorded, run

from holdfast import api
from holdfast.events import AnyEvent, RankStepTime, StepTimesCompared
from holdfast.report.rank_times import MAX_SHOWN
from holdfast.report.report_page import report_page
from holdfast.report.run_figures import figures_of, report_markdown
from holdfast.report.run_record import record_run
from holdfast.report.status_reducer import status_from_events


def compared(*slowest: RankStepTime, replica: int = 0, attempt: int = 0, own_p50_s: float = 0.5) -> StepTimesCompared:
    return StepTimesCompared(
        at=20.0,
        replica=replica,
        attempt=attempt,
        first_step=5,
        last_step=9,
        ranks=8,
        step_p50_s=1.0,
        step_p99_s=1.2,
        own_p50_s=own_p50_s,
        own_p99_s=0.75,
        slowest=slowest,
    )


COMPARED: list[AnyEvent] = [
    compared(RankStepTime(3, 0.75, "data", 0.2), RankStepTime(1, 0.5, "host", 0.0)),
    compared(RankStepTime(3, 0.65, "data", 0.1), own_p50_s=0.5),
    compared(RankStepTime(1, 0.5, "forward", 0.0)),
    compared(RankStepTime(7, 0.6, "host", 0.1), replica=1),
]


def test_report_names_the_ranks_that_were_the_slowest_most_often(tmp_path: Path) -> None:
    record = record_run([*run(), *COMPARED], "demo-k3m9tz")
    times = record.rank_times
    assert times is not None
    assert [(each.replica, each.rank, each.times, each.compared) for each in times.slowest] == [
        (0, 3, 2, 3),
        (1, 7, 1, 1),
        (0, 1, 1, 3),
    ]
    assert times.slowest[0].lag == pytest.approx(0.4)
    assert figures_of(record)["step time p50 / p99 of ranks"] == "1 s / 1.2 s"
    Page(page := report_page([record]))
    assert "<h2>Slowest ranks</h2>" in page
    assert "7 of replica 1" in page
    assert "| 3 | 2 of 3 comparisons | 40.0 % | data |" in report_markdown([record])
    written = api.write_report([record], "json", tmp_path / "report.json")
    document = msgspec.json.decode(written.read_bytes())
    assert document["rank_times"]["slowest"][0]["phase"] == "data"


def test_report_of_ranks_that_measured_no_steps_says_nothing_of_them() -> None:
    record = recorded()
    assert record.rank_times is None
    assert figures_of(record)["own time p50 / p99 of ranks"] == ""
    assert "Slowest ranks" not in report_page([record])


def test_slow_ranks_of_a_large_run_are_bounded() -> None:
    events = [compared(RankStepTime(rank, 0.6, "data", 0.1)) for rank in range(500)]
    times = record_run([*run(), *events], "demo-k3m9tz").rank_times
    assert times is not None
    assert len(times.slowest) == MAX_SHOWN


def test_status_has_the_times_of_this_attempt_only() -> None:
    events = run()
    before = status_from_events([*events[:10], compared(RankStepTime(3, 0.75, "data", 0.2))])
    assert before.replicas[0].step_times is not None
    status = status_from_events(events[10:], before)
    assert status.replicas[0].step_times is None
    assert status_from_events([compared(attempt=7)], status).replicas[0].step_times is None
