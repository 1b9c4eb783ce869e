"""The figures of a run in a report, as text; and the whole report as data or Markdown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from holdfast.report.formatting import duration, percentage, sanitize, size
from holdfast.report.rank_times import SLOW_RANK_HEAD, rank_time_figures, slow_rank_rows
from holdfast.report.run_comparison import job_differences, step_time_ratio
from holdfast.report.run_record import Quantity, RunRecord
from holdfast.report.run_summary import format_ettr
from holdfast.report.scheduler_text import ACCOUNTED_HEAD, accounted_document, accounted_rows, accounted_sentence

MAX_FAILURES = 20
"""Failures in Markdown, the last ones."""


def outcome_of(record: RunRecord) -> str:
    """`succeeded`, `failed`, `cancelled` or `not over`."""
    status = record.status
    return status.outcome.value if status.outcome and status.finished_at is not None else "not over"


def figures_of(record: RunRecord) -> dict[str, str]:
    """The figures of a run by name; empty where they are not known."""
    status = record.status
    account = status.account(record.last_at)
    metrics = status.history.metrics
    per_step = f"{record.device_hours / account.steps:,.3g}" if account.steps and status.devices else ""
    return {
        "ETTR": format_ettr(account).removeprefix("ETTR "),
        "steps": f"{account.steps:,}" if account.steps else "",
        "duration": duration(account.total_s),
        "restarts": f"{status.restarts:,}",
        "resumed": f"{status.resumed_run}, step {status.resumed_step:,}" if status.resumed_run else "",
        "size of a checkpoint": size(status.checkpoint.size_bytes) if status.checkpoint else "",
        "last loss": f"{metrics['loss']:.4g}" if "loss" in metrics else "",
        "median time of a step": _median(record, Quantity.STEP_S, lambda value: f"{value:.3g} s"),
        "predicted time of a step": "; ".join(record.predicted_step.lines) if record.predicted_step else "",
        **rank_time_figures(record.rank_times),
        "median tokens/s": _median(record, Quantity.TOKENS_PER_S, lambda value: f"{value:,.0f}"),
        "median MFU": _median(record, Quantity.MFU, percentage),
        "devices": f"{status.devices:,}" if status.devices else "",
        "device hours": f"{record.device_hours:,.2f}" if status.devices else "",
        "device hours per step": per_step,
    }


def _median(record: RunRecord, quantity: Quantity, shown: Callable[[float], str]) -> str:
    points = [point for curve in record.curves.values() for point in curve]
    values = sorted(value for point in points if (value := point.of(quantity)) is not None)
    return shown(values[len(values) // 2]) if values else ""


def report_document(record: RunRecord) -> Mapping[str, object]:
    """The same figures of one run as data; `figures` are those of the page, and times are in seconds."""
    account = record.status.account(record.last_at)
    return {
        "run": record.status.run,
        "job": record.job,
        "version": record.version,
        "outcome": outcome_of(record),
        "ettr": account.ettr,
        "total_s": account.total_s,
        "time_s": {str(part): spent_s for part, spent_s in account.parts.items()},
        "steps": account.steps,
        "restarts": record.status.restarts,
        "rank_times": record.rank_times,
        "scheduler": accounted_document(record.scheduler),
        "figures": {name: value for name, value in figures_of(record).items() if value},
    }


def report_markdown(records: Sequence[RunRecord]) -> str:
    """The figures and failures of runs as Markdown."""
    values = [{"outcome": outcome_of(record), **figures_of(record)} for record in records]
    names = [name for name in values[0] if any(one.get(name) for one in values)]
    runs = [record.status.run for record in records]
    lines = [
        f"# {' and '.join(runs)}",
        "",
        *_rows(["", *runs], [[name, *(one[name] for one in values)] for name in names]),
    ]
    for record in records[1:]:
        if ratio := step_time_ratio(records[0], record):
            lines += [
                "",
                f"Steps of {record.status.run}: {ratio}.",
            ]
    if len(records) > 1 and (differences := job_differences(records)):
        lines += ["", *_rows(["field", *runs], [[each.field, *each.values] for each in differences])]
    for record in records:
        if (times := record.rank_times) and times.slowest:
            table = _rows(SLOW_RANK_HEAD, slow_rank_rows(times))
            lines += ["", f"## Slowest ranks of {record.status.run}", "", *table]
        if record.scheduler is not None:
            lines += ["", f"## Jobs of {record.status.run}, by the scheduler", "", accounted_sentence(record.scheduler)]
            if rows := accounted_rows(record.scheduler):
                lines += ["", *_rows(ACCOUNTED_HEAD, rows)]
        recoveries = record.status.history.recoveries
        failures = [[duration(each.after_s), each.finding.code, each.finding.what, each.action] for each in recoveries]
        if failures:
            table = _rows(["after", "cause", "what", "action"], failures[-MAX_FAILURES:])
            lines += ["", f"## Failures of {record.status.run}", "", *table]
    return "\n".join(lines) + "\n"


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(sanitize(cell).replace('|', chr(92) + '|') for cell in cells)} |"

    return [line(head), f"|{' --- |' * len(head)}", *map(line, rows)]
