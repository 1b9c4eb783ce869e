"""The verb `checkpoint`: have a run take one now, and wait until it is there."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common_options import OutputOption, RunArgument
from holdfast.cli.output import Output, console, print_json, print_text


def checkpoint(
    run: RunArgument = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Longest to wait for it.")
    ] = 600.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Have a run take a checkpoint at its next step, and wait.

    Its ranks need a `holdfast.train` Session. The run goes on.
    """
    from holdfast import api

    found = api.find_run(run)
    with console(stderr=True).status(f"{found.run_id} is asked for a checkpoint; it has {timeout_s:g} s for it"):
        taken = api.checkpoint(found, timeout_s=timeout_s)
    if output is Output.JSON:
        print_json({"run": found.run_id, "step": taken.step, "path": taken.path, "took_s": taken.took_s})
    else:
        print_text(f"step {taken.step} of {found.run_id} is saved: {taken.path}")
