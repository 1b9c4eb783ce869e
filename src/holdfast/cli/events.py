"""The command `events`: the event log of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common_options import OutputOption, RunArgument
from holdfast.cli.output import Output, print_json, print_text


def events(
    run: RunArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run ends.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print every event of a run, one per line."""
    from holdfast import api
    from holdfast.cli.event_text import event_line

    found = api.find_run(run)
    for event in api.follow(found) if follow else api.events(found):
        if event is None:
            continue
        if output is Output.JSON:
            print_json(event)
        else:
            print_text(event_line(event))
