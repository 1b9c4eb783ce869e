"""The command `report`: what happened in a run as a file to keep or to send."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common_options import LOCAL, RunTargetOption, complete_run
from holdfast.cli.output import print_json, print_text, working


class ReportFormat(StrEnum):
    """Values of `-o`."""

    HTML = "html"
    MARKDOWN = "md"
    JSON = "json"


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...",
            help="Ids of runs, or unique prefixes; several are compared.",
            autocompletion=complete_run,
        ),
    ] = None,
    on: RunTargetOption = LOCAL,
    output: Annotated[ReportFormat, typer.Option("--output", "-o", help="Output format.")] = ReportFormat.HTML,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="File to write (default for html: RUN.html).")
    ] = None,
) -> None:
    """Write a report of a run, or compare several.

    The HTML file has everything in it: curves, where the time went, each failure with its evidence, the configuration.
    """
    from holdfast import api

    with working("reading the event log"):
        records = [api.record(api.find_run(run, on)) for run in runs or [None]]
    match output:
        case ReportFormat.JSON if to is None:
            print_json(*map(api.report_document, records))
        case ReportFormat.MARKDOWN if to is None:
            print_text(api.report_markdown(records).rstrip())
        case _:
            with working("writing the report"):
                path = api.write_report(records, output.value, to)
            print_text(str(path))
