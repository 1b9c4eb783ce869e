"""The command `ps`: list runs, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import OutputOption
from holdfast.cli.output import Output, print_json, print_rich, print_text

if TYPE_CHECKING:
    from holdfast.report.run_row import RunRow
    from holdfast.run_dir import RunDir

FIELDS = ("job", "phase", "created_at", "finished_at", "restarts", "exit_code", "step", "nodes", "ranks", "took_s")
HEADINGS = ("run", "state", "nodes", "ranks", "step", "restarts", "took")


def ps(
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", min=1, help="Maximum number of runs.")] = 20,
    output: OutputOption = Output.TEXT,
) -> None:
    """List runs, newest first."""
    from rich.table import Table

    from holdfast import api

    runs = api.runs()[:last]
    abandoned = {run.run_id for run in runs if _is_orphaned(run)}
    known = {run.run_id: _read_row(run) for run in runs}
    if output is Output.JSON:
        print_json([{"run": run, **_data(brief), "orphaned": run in abandoned} for run, brief in known.items()])
        return
    if not runs:
        print_text("no runs yet; `holdfast run JOB.yaml` starts one")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in HEADINGS:
        # A truncated id cannot be copied; in a narrow window the other columns shrink.
        table.add_column(heading, no_wrap=True, min_width=max(map(len, known)) if heading == "run" else None)
    for run, brief in known.items():
        table.add_row(run, *_cells(brief))
    print_rich(table)
    for run, brief in known.items():
        if brief and run in abandoned:
            print_text(f"{run} has no controller; `holdfast attach {run}` starts one")


def _is_orphaned(run: RunDir) -> bool:
    from holdfast import api

    try:
        return api.is_orphaned(run)
    except OSError:  # its log is not a regular file
        return False


def _read_row(run: RunDir) -> RunRow | None:
    """None if the log is damaged or written by a newer holdfast; the other runs are still listed."""
    from holdfast import api
    from holdfast.events.log import UnsupportedFormat

    try:
        brief = api.run_row(run)
    except (UnsupportedFormat, LookupError, OSError):
        return None
    return None if brief.created_at is None and brief.log_bytes else brief


def _data(brief: RunRow | None) -> dict[str, object]:
    if brief is None:
        return {**dict.fromkeys(FIELDS), "phase": "unreadable"}
    return {name: getattr(brief, name) for name in FIELDS}


def _cells(brief: RunRow | None) -> tuple[str, ...]:
    from holdfast.report.formatting import duration

    if brief is None:
        return ("unreadable",)
    took = "" if brief.took_s is None else duration(brief.took_s)
    step = "" if brief.step is None else str(brief.step)
    return (brief.phase.value, str(brief.nodes), str(brief.ranks), step, str(brief.restarts), took)
