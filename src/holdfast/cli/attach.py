"""The command `attach`: follow a run, and restart its controller if it has died."""

from __future__ import annotations

import typer

from holdfast.cli.common_options import OutputOption, RunArgument
from holdfast.cli.output import Output
from holdfast.errors import ExitCode


def attach(run: RunArgument = None, output: OutputOption = Output.TEXT) -> None:
    """Follow a run until it ends.

    The exit code is the run's. Ctrl-C detaches and leaves the run running. A dead controller is restarted.
    """
    from holdfast import api
    from holdfast.cli.follow import detach_on_interrupt, follow_run
    from holdfast.cli.interrupts import InterruptCounter

    found = api.find_run(run)
    api.restart_controller(found)
    with InterruptCounter() as presses:
        raise typer.Exit(follow_run(found, output, detach_on_interrupt, presses) or ExitCode.OK)
