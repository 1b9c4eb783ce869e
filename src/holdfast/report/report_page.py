"""The report of one run or several as a single HTML file: no scripts, nothing fetched, everything escaped. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from holdfast.diagnose.knowledge.index import find
from holdfast.findings import OWNER_TEXT, Finding
from holdfast.metrics.metric_text import BREAKDOWN, format_metrics
from holdfast.report.formatting import count, duration, percentage, sanitize, short_digest
from holdfast.report.goodput import TimeCategory
from holdfast.report.html_page import Cell, Number, Raw, curve_keys, html_page, section, table, text
from holdfast.report.rank_times import SLOW_RANK_HEAD, slow_rank_rows
from holdfast.report.run_comparison import job_differences, step_time_ratio
from holdfast.report.run_figures import figures_of, outcome_of
from holdfast.report.run_history import RecoverySummary
from holdfast.report.run_record import MarkKind, Quantity, RunRecord
from holdfast.report.scheduler_text import ACCOUNTED_HEAD, accounted_rows, accounted_sentence
from holdfast.report.svg_chart import Lane, Line, line_chart, timeline

MAX_FAILURES = 60
"""Failures that are shown in full, the last ones; all are in the table of codes."""
MAX_EVIDENCE = 12


class _Curve(NamedTuple):
    """One chart."""

    quantity: Quantity
    title: str
    unit: str
    factor: float = 1.0


_COLOURS = {
    MarkKind.ATTEMPT: 0,
    MarkKind.FAILURE: 4,
    MarkKind.CHECKPOINT: 2,
    MarkKind.DRILL: 3,
    MarkKind.UPDATE: 5,
    MarkKind.WORLD_SIZE: 6,
    MarkKind.CONTROLLER: 1,
}
_CURVES = (
    _Curve(Quantity.LOSS, "Loss", ""),
    _Curve(Quantity.GRAD_NORM, "Gradient norm", ""),
    _Curve(Quantity.STEP_S, "Time of a step", "s"),
    _Curve(Quantity.TOKENS_PER_S, "Throughput", "tokens/s"),
    _Curve(Quantity.MFU, "MFU, full attention", "%", 100.0),
)


def report_page(records: Sequence[RunRecord]) -> str:
    """The whole file."""
    first = records[0]
    title = first.status.run if len(records) == 1 else f"{len(records)} runs compared"
    body = [_one_run(first)] if len(records) == 1 else _several_runs(records)
    return html_page(title, body)


def _one_run(record: RunRecord) -> str:
    return "".join(
        (
            _head(record),
            _cards(record),
            section("Curves", _charts([record])),
            section("Where the time went", _time(record)),
            section("Slowest ranks", _slowest_ranks(record)),
            section("A profiled step", _profile(record)),
            section("What happened", _timeline(record)),
            section("Failures", _failures(record)),
            section("Other findings", _findings(record)),
            section("Jobs, by the scheduler", _scheduler(record)),
            section("Checks and fabric", _checks(record)),
            section("Configuration", _configuration(record)),
        )
    )


def _several_runs(records: Sequence[RunRecord]) -> list[str]:
    return [
        f"<h1>{len(records)} runs compared</h1>{curve_keys(record.status.run for record in records)}",
        section("Figures", _figures(records)),
        section("Time of a step, relative to the first run", _ratios(records)),
        section("Curves", _charts(records)),
        section("Differences of their jobs", _job_differences(records)),
        *(f"<hr>{_one_run(record)}" for record in records),
    ]


def _head(record: RunRecord) -> str:
    status, word = record.status, outcome_of(record)
    began = "" if status.created_at is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(status.created_at))
    because = f": {text(status.reason)}" if status.reason else ""
    return (
        f"<h1>{text(status.run)} <span class='{escape(word)}'>{escape(word)}</span>{because}</h1>"
        f"<p class='dim'>job {text(status.job)}, started {began}, holdfast {text(record.version)}</p>"
    )


def _cards(record: RunRecord) -> str:
    cards = (
        f'<div class="card"><span class="dim">{escape(name)}</span><b>{text(value)}</b></div>'
        for name, value in figures_of(record).items()
        if value
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _charts(records: Sequence[RunRecord]) -> str:
    found: list[str] = []
    for curve in _CURVES:
        lines = [
            Line(_line_name(record, replica, len(records)), _segments(record, replica, curve))
            for record in records
            for replica in list(record.curves)[: None if len(records) == 1 else 1]
        ]
        if chart := line_chart(lines, unit=curve.unit):
            found.append(f"<div><h3>{escape(curve.title)}</h3>{chart}</div>")
    return f'<div class="charts">{"".join(found)}</div>' if found else ""


def _line_name(record: RunRecord, replica: int, runs: int) -> str:
    return f"replica {replica}" if runs == 1 else record.status.run


def _segments(record: RunRecord, replica: int, curve: _Curve) -> list[list[tuple[float, float]]]:
    """A curve's points, apart for each attempt."""
    by_attempt: dict[int, list[tuple[float, float]]] = {}
    for point in record.curves[replica]:
        if (value := point.of(curve.quantity)) is not None:
            by_attempt.setdefault(point.attempt, []).append((point.step, value * curve.factor))
    return list(by_attempt.values())


def _time(record: RunRecord) -> str:
    account = record.status.account(record.last_at)
    rows = [
        (
            part.value,
            Number(duration(account.parts[part])),
            Number(percentage(account.parts[part] / account.total_s)),
            Raw(f'<div class="bar" style="width:{100 * account.parts[part] / account.total_s:.2f}%"></div>'),
        )
        for part in TimeCategory
        if account.parts.get(part)
    ]
    return table(("category", "time", "share", ""), rows) if rows else ""


def _slowest_ranks(record: RunRecord) -> str:
    """The ranks that the others waited for; empty if none were compared."""
    if not (times := record.rank_times) or not times.slowest:
        return ""
    rows = [(rank, Number(often), Number(lag), phase) for rank, often, lag, phase in slow_rank_rows(times)]
    return table(SLOW_RANK_HEAD, rows)


def _profile(record: RunRecord) -> str:
    """The parts of the last profiled step; empty if none was profiled."""
    return "".join(f"<p>{text(words)}</p>" for words in format_metrics(record.status.history.metrics, BREAKDOWN))


def _timeline(record: RunRecord) -> str:
    lanes = [
        Lane(kind.value, _COLOURS[kind], [(mark.at, sanitize(mark.text)) for mark in record.marks.get(kind, ())])
        for kind in MarkKind
    ]
    begun = record.status.created_at
    if begun is None or not any(lane.moments for lane in lanes):
        return ""
    return timeline(lanes, first=begun, last=record.last_at)


def _failures(record: RunRecord) -> str:
    recoveries = record.status.history.recoveries
    if not recoveries:
        return "<p>None.</p>"
    codes: dict[str, list[RecoverySummary]] = {}
    for each in recoveries:
        codes.setdefault(each.finding.code, []).append(each)
    rows = [
        (code, Number(f"{len(each):,}"), Number(_mean_recovery(each)))
        for code, each in sorted(codes.items(), key=lambda item: -len(item[1]))
    ]
    shown = "".join(map(_failure, recoveries[-MAX_FAILURES:]))
    left = len(recoveries) - MAX_FAILURES
    more = f"<p class='dim'>The first {count(left, 'failure')} are only in the table.</p>" if left > 0 else ""
    return f"{table(('cause', 'failures', 'mean time to the next step'), rows)}{more}{shown}"


def _mean_recovery(recoveries: Sequence[RecoverySummary]) -> str:
    known = [each.until_step_s for each in recoveries if each.until_step_s is not None]
    return duration(sum(known) / len(known)) if known else ""


def _failure(recovery: RecoverySummary) -> str:
    again = f" · {count(recovery.recomputed_steps, 'step')} done again" if recovery.recomputed_steps else ""
    cost = "no step followed" if recovery.until_step_s is None else f"next step {duration(recovery.until_step_s)} later"
    return (
        f'<div class="failure"><h3>after {duration(recovery.after_s)}: {text(recovery.finding.what)}</h3>'
        f"<p class='dim'>{text(recovery.finding.code)} · {text(recovery.finding.where)} · attempt {recovery.attempt}"
        f" of replica {recovery.replica} · {text(recovery.action)} · {cost}"
        f"{again}</p>{_details(recovery.finding)}</div>"
    )


def _details(finding: Finding) -> str:
    """Evidence, cause and remedy."""
    evidence = "\n".join(text(line) for line in finding.evidence[:MAX_EVIDENCE])
    quoted = f"<pre>{evidence}</pre>" if evidence else ""
    known = next((each for each in find(finding.code) if each.code == finding.code), None)
    cause = f"<p>{text(known.cause)}</p>" if known else ""
    remedy = finding.remedy or (known.remedy if known else "")
    who = "" if remedy.startswith("Nothing") else f" <span class='dim'>({OWNER_TEXT[finding.owner]})</span>"
    todo = f"<p><b>What to do:</b> {text(remedy)}{who}</p>"
    return f"{quoted}{cause}{todo if remedy else ''}"


def _findings(record: RunRecord) -> str:
    blocks = (
        f"<details><summary>{text(each.what)} <span class='dim'>{text(each.code)}</span></summary>"
        f"{_details(each)}</details>"
        for each in record.status.history.raised.values()
    )
    return "".join(blocks)


def _checks(record: RunRecord) -> str:
    passed = record.checked_nodes - record.failed_checks
    lines = [f"{passed} of {count(record.checked_nodes, 'node')} passed their checks"] if record.checked_nodes else []
    lines += [f"traffic between nodes: {record.status.fabric}"] if record.status.fabric else []
    facts = table(("on all nodes", ""), [(name, value) for name, value in sorted(record.facts.items())])
    return "".join(f"<p>{text(line)}</p>" for line in lines) + (facts if record.facts else "")


def _scheduler(record: RunRecord) -> str:
    """What was accounted; empty on a target without a scheduler."""
    if (account := record.scheduler) is None:
        return ""
    rows = [(job, state, *map(Number, figures)) for job, state, *figures in accounted_rows(account)]
    return f"<p>{text(accounted_sentence(account))}</p>{table(ACCOUNTED_HEAD, rows) if rows else ''}"


def _configuration(record: RunRecord) -> str:
    rows = [
        (f"from step {version.step:,}", short_digest(version.digest)) for version in record.status.history.code_versions
    ]
    code = table(("code", "digest"), rows) if rows else ""
    return f"{code}<pre>{_text_lines(json.dumps(record.job, indent=2, default=str))}</pre>" if record.job else code


def _text_lines(lines: str) -> str:
    return "\n".join(map(text, lines.splitlines()))


def _figures(records: Sequence[RunRecord]) -> str:
    values = [{"outcome": outcome_of(record), **figures_of(record)} for record in records]
    names = [name for name in values[0] if any(one.get(name) for one in values)]
    rows = [(name, *(Number(one.get(name, "")) for one in values)) for name in names]
    return table(("", *(record.status.run for record in records)), rows)


def _ratios(records: Sequence[RunRecord]) -> str:
    rows: list[tuple[Cell, ...]] = []
    for record in records[1:]:
        ratio = step_time_ratio(records[0], record)
        if ratio is None:
            rows.append((record.status.run, "too few steps", "", ""))
            continue
        interval = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        rows.append((record.status.run, interval, f"{ratio.floor_low:.3f} to {ratio.floor_high:.3f}", ratio.verdict))
    return table(("run", "ratio of medians", "halves of the first run", "verdict"), rows)


def _job_differences(records: Sequence[RunRecord]) -> str:
    rows = [(each.field, *each.values) for each in job_differences(records)]
    return table(("field", *(record.status.run for record in records)), rows) if rows else "<p>None.</p>"
