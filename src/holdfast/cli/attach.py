"""The verb `attach`: show a run again, and bring its controller back where it has died."""

from __future__ import annotations

import typer

from holdfast.cli.output import Output
from holdfast.cli.request import OutputOption, RunArgument
from holdfast.errors import ExitCode


def attach(run: RunArgument = None, output: OutputOption = Output.TEXT) -> None:
    """Show a run again, until it ends.

    The exit code is the run's. Ctrl-C leaves it running. A controller that has died is started again.
    """
    from holdfast import api
    from holdfast.cli.presses import Presses
    from holdfast.cli.watching import leave_run, watch

    found = api.find_run(run)
    api.revive(found)
    with Presses() as presses:
        raise typer.Exit(watch(found, output, leave_run, presses) or ExitCode.OK)
