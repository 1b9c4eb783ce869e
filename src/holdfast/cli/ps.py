"""The verb `ps`: runs, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import Output, say, say_json, show
from holdfast.cli.request import OutputOption

if TYPE_CHECKING:
    from holdfast.folder import RunFolder
    from holdfast.report.brief import Brief

FIELDS = ("job", "phase", "created_at", "finished_at", "restarts", "exit_code", "step", "nodes", "ranks", "took_s")
HEADINGS = ("run", "state", "nodes", "ranks", "step", "restarts", "took")


def ps(
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", min=1, help="How many.")] = 20,
    output: OutputOption = Output.TEXT,
) -> None:
    """List runs, newest first."""
    from rich.table import Table

    from holdfast import api

    runs = api.runs()[:last]
    abandoned = {run.run for run in runs if _abandoned(run)}
    known = {run.run: _glance(run) for run in runs}
    if output is Output.JSON:
        say_json([{"run": run, **_data(brief), "abandoned": run in abandoned} for run, brief in known.items()])
        return
    if not runs:
        say("no runs yet; `holdfast run JOB.yaml` starts one")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in HEADINGS:
        # An id that is cut cannot be copied; where the window is narrow, the other columns give way.
        table.add_column(heading, no_wrap=True, min_width=max(map(len, known)) if heading == "run" else None)
    for run, brief in known.items():
        table.add_row(run, *_cells(brief))
    show(table)
    for run, brief in known.items():
        if brief and run in abandoned:
            say(f"{run} has no controller; `holdfast attach {run}` starts one")


def _abandoned(run: RunFolder) -> bool:
    from holdfast import api

    try:
        return api.abandoned(run)
    except OSError:  # its log is no file
        return False


def _glance(run: RunFolder) -> Brief | None:
    """None where the log is damaged, or was written by a newer holdfast: that is no reason to hide the other runs."""
    from holdfast import api
    from holdfast.events.log import UnsupportedFormat

    try:
        brief = api.glance(run)
    except (UnsupportedFormat, LookupError, OSError):
        return None
    return None if brief.created_at is None and brief.log_bytes else brief


def _data(brief: Brief | None) -> dict[str, object]:
    if brief is None:
        return {**dict.fromkeys(FIELDS), "phase": "unreadable"}
    return {name: getattr(brief, name) for name in FIELDS}


def _cells(brief: Brief | None) -> tuple[str, ...]:
    from holdfast.report.words import duration

    if brief is None:
        return ("unreadable",)
    took = "" if brief.took_s is None else duration(brief.took_s)
    step = "" if brief.step is None else str(brief.step)
    return (brief.phase.value, str(brief.nodes), str(brief.ranks), step, str(brief.restarts), took)
