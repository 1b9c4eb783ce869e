"""The verb `checkpoint`: have a run take one now, and wait until it is there."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.output import Output, console, say, say_json
from holdfast.cli.request import OutputOption, RunArgument


def checkpoint(
    run: RunArgument = None,
    within_s: Annotated[
        float, typer.Option("--within", metavar="SECONDS", min=0.0, help="Longest to wait for it.")
    ] = 600.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Have a run take a checkpoint at its next step, and wait.

    Its ranks need a `holdfast.train` Session. The run goes on.
    """
    from holdfast import api

    found = api.find_run(run)
    with console(stderr=True).status(f"{found.run} is asked for a checkpoint; it has {within_s:g} s for it"):
        taken = api.checkpoint(found, within_s=within_s)
    if output is Output.JSON:
        say_json({"run": found.run, "step": taken.step, "path": taken.path, "took_s": taken.took_s})
    else:
        say(f"step {taken.step} of {found.run} is saved: {taken.path}")
