"""A report of a run is one bounded, self-contained file in which nothing that ranks have printed can run."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.golden import Golden

from holdfast.events import (
    AnyEvent,
    AttemptStarted,
    CheckpointCommitted,
    ControllerStarted,
    NodeRequested,
    Outcome,
    RecoveryDecided,
    RunCreated,
    RunFinished,
    StepCommitted,
)
from holdfast.findings import Finding
from holdfast.report.report_page import report_page
from holdfast.report.run_comparison import job_differences, step_time_ratio
from holdfast.report.run_figures import report_markdown
from holdfast.report.run_record import MAX_MARKS, MAX_POINTS, MarkKind, Quantity, RunRecord, record_run
from holdfast.report.svg_chart import Line, line_chart

VOID = {"meta", "br", "hr", "circle", "line", "path", "rect"}
HOSTILE = '</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b]0;title\x07 " onload="x'


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects them with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag


def run(
    *, steps: int = 100, step_s: float = 1.0, jitter: float = 0.0, words: str = "it broke", lr: float = 1e-3
) -> list[AnyEvent]:
    chance, now = random.Random(1), 10.0
    found: list[AnyEvent] = [
        RunCreated(at=0.0, run="demo-k3m9tz", job={"name": "demo", "env": {"LR": str(lr)}}, version="0.1.0"),
        ControllerStarted(at=0.1, pid=1, incarnation="c"),
        NodeRequested(at=0.2, node=0, generation=0),
        AttemptStarted(at=1.0, replica=0, attempt=0, world_size=2, master_addr="a", master_port=1, nodes=(0,)),
    ]
    attempt = 0
    for step in range(steps):
        took = step_s * (1 + jitter * chance.uniform(-1, 1))
        metrics = {"loss": 5.0 / (step + 1), "tokens": 100.0, "grad_norm": 1.0}
        found.append(
            StepCommitted(
                at=now + took, replica=0, attempt=attempt, step=step, started=now, ended=now + took, metrics=metrics
            )
        )
        now += took
        if step == steps // 2:
            failure = Finding(code="rank-killed", what=words, where="rank 1 on node1", evidence=(words,), remedy=words)
            found += [
                CheckpointCommitted(at=now, node=0, replica=0, attempt=0, step=step, path="c", size_bytes=123 * 10**7),
                RecoveryDecided(at=now + 1, replica=0, attempt=0, action="restart", failed_at=now, finding=failure),
                AttemptStarted(
                    at=now + 2, replica=0, attempt=1, world_size=2, master_addr="a", master_port=1, nodes=(0,)
                ),
            ]
            attempt, now = 1, now + 5
    return [*found, RunFinished(at=now + 1, outcome=Outcome.SUCCEEDED, exit_code=0, reason="every rank finished")]


def recorded(**given: float | str) -> RunRecord:
    return record_run(run(**given), "demo-k3m9tz")  # type: ignore[arg-type]


def test_page_is_whole_and_fetches_nothing() -> None:
    text = report_page([recorded()])
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    names = {name for _, attributes in page.tags for name in attributes}
    assert not [name for name in names if name in ("src", "href") or name.startswith("on")]
    for heading in ("Curves", "Where the time went", "What happened", "Failures", "Configuration"):
        assert f"<h2>{heading}</h2>" in text
    assert "next step 6.0 s later" in text
    assert "1.23 GB" in text


def test_page_and_markdown_name_the_run_that_was_resumed() -> None:
    created, *events = run()
    assert isinstance(created, RunCreated)
    record = record_run([replace(created, resumed_run="demo-before", resumed_step=40), *events], "demo-k3m9tz")
    assert "<b>demo-before, step 40</b>" in report_page([record])
    assert "| resumed | demo-before, step 40 |" in report_markdown([record])
    assert ">resumed<" not in report_page([recorded()])


def test_page_shows_the_last_profile_and_nothing_without_one() -> None:
    events = run()
    assert "A profiled step" not in report_page([record_run(events, "demo-k3m9tz")])
    profile = {"profile_forward_s": 0.3, "profile_backward_s": 0.5, "profile_communication_s": 0.2}
    profiled = next(event for event in events if isinstance(event, StepCommitted) and event.step == 50)
    events[events.index(profiled)] = replace(profiled, metrics={**profiled.metrics, **profile})
    page = report_page([record_run(events, "demo-k3m9tz")])
    assert "of 1.00 s a step, profiled: forward 30%, backward 50%, communication 20%" in page


def test_words_of_ranks_cannot_become_markup() -> None:
    page = Page(text := report_page([recorded(words=HOSTILE)]))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "\x1b" not in text
    assert "&lt;script&gt;" in text


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4 * MAX_POINTS))
def test_thinned_curve_keeps_every_step_and_the_mean(attempts: list[int]) -> None:
    found: list[AnyEvent] = []
    for step, attempt in enumerate(sorted(attempts)):
        found.append(
            StepCommitted(
                at=step, replica=0, attempt=attempt, step=step, started=step, ended=step + 1, metrics={"loss": step}
            )
        )
    points = record_run(found, "r").curves[0]
    assert len(points) < 2 * MAX_POINTS
    assert sum(point.steps for point in points) == len(attempts)
    total = sum((point.of(Quantity.LOSS) or 0.0) * point.numbers["loss"] for point in points)
    assert total == pytest.approx(sum(range(len(attempts))))


def test_marks_are_bounded() -> None:
    found = [CheckpointCommitted(at=at, node=0, replica=0, attempt=0, step=at, path="c") for at in range(9 * MAX_MARKS)]
    marks = record_run(found, "r").marks[MarkKind.CHECKPOINT]
    assert MAX_MARKS // 2 <= len(marks) <= MAX_MARKS
    assert marks[0].at == 0


def test_run_that_is_10_percent_slower_is_found_and_one_like_it_is_not() -> None:
    first, same = recorded(jitter=0.05, steps=400), recorded(jitter=0.05, steps=380)
    slower = recorded(jitter=0.05, steps=400, step_s=1.1)
    found, chance = step_time_ratio(first, slower), step_time_ratio(first, same)
    assert found is not None
    assert chance is not None
    assert found.value == pytest.approx(1.1, abs=0.02)
    assert found.verdict.endswith("% slower")
    assert chance.verdict == "no difference beyond chance"
    assert step_time_ratio(first, recorded(steps=4)) is None


def test_comparison_shows_differences_of_the_jobs(golden: Golden) -> None:
    records = [recorded(), recorded(lr=2e-3)]
    assert [each.field for each in job_differences(records)] == ["env.LR"]
    Page(report_page(records))
    golden(report_markdown(records))


@pytest.mark.parametrize("value", [0.0, 1e-9, 3.14, 1e15, -2.5])
def test_chart_of_one_value_has_an_axis_around_it(value: float) -> None:
    chart = line_chart([Line("a", [[(0, value), (1, value)]])])
    Page(chart)
    places = [float(found) for found in re.findall(r"[ML](?:[\d.]+),([\d.]+)", chart)]
    assert all(10 < place < 200 for place in places)


def test_chart_leaves_out_what_is_not_finite() -> None:
    assert line_chart([Line("a", [[(0, float("nan")), (1, float("inf"))]])]) == ""
    assert "nan" not in line_chart([Line("a", [[(0, 1.0), (1, float("nan")), (2, 2.0)]])])
