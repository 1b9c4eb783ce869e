"""The verb `ps`: runs, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import Output, say, say_json, show
from holdfast.cli.request import OutputOption

if TYPE_CHECKING:
    from holdfast.folder import RunFolder
    from holdfast.report.status import RunStatus

FIELDS = ("job", "phase", "created_at", "finished_at", "restarts", "exit_code")
HEADINGS = ("run", "state", "nodes", "ranks", "step", "restarts", "took")


def ps(
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", min=1, help="How many.")] = 20,
    output: OutputOption = Output.TEXT,
) -> None:
    """List runs, newest first."""
    from rich.table import Table

    from holdfast import api

    runs = api.runs()[:last]
    abandoned = {run.run for run in runs if api.abandoned(run)}
    known = {run.run: _status(run) for run in runs}
    if output is Output.JSON:
        say_json([{"run": run, **_data(status), "abandoned": run in abandoned} for run, status in known.items()])
        return
    if not runs:
        say("no runs yet; `holdfast run JOB.yaml` starts one")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True)
    for run, status in known.items():
        table.add_row(run, *_cells(status))
    show(table)
    for run, status in known.items():
        if status and run in abandoned:
            say(f"{run} has no controller; `holdfast attach {run}` starts one")


def _status(run: RunFolder) -> RunStatus | None:
    """None where the log is damaged, or was written by a newer holdfast: that is no reason to hide the other runs."""
    from holdfast import api
    from holdfast.events.log import UnsupportedFormat

    try:
        status = api.status(run)
        damaged = status.created_at is None and run.events.exists() and run.events.stat().st_size > 0
    except (UnsupportedFormat, LookupError, OSError):
        return None
    return None if damaged else status


def _data(status: RunStatus | None) -> dict[str, object]:
    if status is None:
        return {**dict.fromkeys(FIELDS), "phase": "unreadable", "step": None}
    return {**{name: getattr(status, name) for name in FIELDS}, "step": status.lead.step}


def _cells(status: RunStatus | None) -> tuple[str, ...]:
    from holdfast.report.words import duration

    if status is None:
        return ("unreadable",)
    ranks = sum(replica.world_size for replica in status.replicas.values())
    took = duration((status.finished_at or status.now) - status.created_at) if status.created_at else ""
    step = "" if status.lead.step is None else str(status.lead.step)
    return (status.phase.value, str(len(status.nodes)), str(ranks), step, str(status.restarts), took)
