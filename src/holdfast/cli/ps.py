"""The command `ps`: list runs, newest first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import asdict

from holdfast.cli.common_options import LOCAL, OutputOption, RunTargetOption
from holdfast.cli.output import Output, print_json, print_rich, print_text

if TYPE_CHECKING:
    from holdfast.launch.target_runs import TargetRun, TargetRuns
    from holdfast.report.run_row import RunRow
    from holdfast.run_dir import RunDir

FIELDS = ("job", "phase", "created_at", "finished_at", "restarts", "exit_code", "step", "nodes", "ranks", "took_s")
TARGET_HEADINGS = ("run", "user", "state", "nodes", "age", "folder here")
HEADINGS = ("run", "state", "nodes", "ranks", "step", "restarts", "took")


def ps(
    on: RunTargetOption = LOCAL,
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", min=1, help="Maximum number of runs.")] = 20,
    output: OutputOption = Output.TEXT,
) -> None:
    """List runs, newest first.

    With --on, those that the target has now, whichever machine started them. Without, those with a folder here.
    """
    from holdfast import api

    if on != LOCAL and (there := api.target_runs(on)) is not None:
        _print_target_runs(there, on, last, output)
        return
    runs = api.runs()[:last]
    abandoned = {run.run_id for run in runs if _is_orphaned(run)}
    known = {run.run_id: _read_row(run) for run in runs}
    if output is Output.JSON:
        print_json([{"run": run, **_data(brief), "orphaned": run in abandoned} for run, brief in known.items()])
        return
    if not runs:
        print_text("no runs yet; `holdfast run JOB.yaml` starts one")
        return
    _print_table(HEADINGS, [(run, *_cells(brief)) for run, brief in known.items()])
    for run, brief in known.items():
        if brief and run in abandoned:
            print_text(f"{run} has no controller; `holdfast attach {run}` starts one")


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        # A truncated id cannot be copied; in a narrow window the other columns shrink.
        width = max(len(row[0]) for row in rows) if heading == "run" else None
        table.add_column(heading, no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(*row)
    print_rich(table)


def _print_target_runs(there: TargetRuns, target: str, last: int, output: Output) -> None:
    from holdfast import api
    from holdfast.cli.finding_text import print_findings

    here = {run.run_id for run in api.runs()}
    runs = there.runs[:last]
    if output is Output.JSON:
        rows = [{**asdict(run), "folder_here": run.run in here} for run in runs]
        print_json({"target": target, "runs": rows, "findings": there.findings})
        return
    if runs:
        _print_table(TARGET_HEADINGS, [(*_target_cells(run), "yes" if run.run in here else "no") for run in runs])
    else:
        print_text(f"{target} has no runs")
    print_findings(there.findings, output)


def _target_cells(run: TargetRun) -> tuple[str, ...]:
    from holdfast.launch.target_runs import TargetRunPhase
    from holdfast.report.formatting import duration

    nodes = "" if run.nodes is None else str(run.nodes)
    if run.running_nodes is not None and run.phase in (TargetRunPhase.PENDING, TargetRunPhase.RUNNING):
        nodes = f"{run.running_nodes}/{nodes or '?'}"
    return run.run, run.user, run.phase.value, nodes, duration(time.time() - run.created_at)


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
