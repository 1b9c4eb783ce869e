"""The command `checkpoint`: request a checkpoint and wait until it is committed."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common_options import OutputOption, RunArgument
from holdfast.cli.output import Output, console, print_json, print_text


def checkpoint(
    run: RunArgument = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long to wait.")
    ] = 600.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Save a checkpoint at the next step, and wait for it.

    The ranks need a `holdfast.train` Session. The run continues.
    """
    from holdfast import api

    found = api.find_run(run)
    with console(stderr=True).status(f"waiting for a checkpoint of {found.run_id} (timeout {timeout_s:g} s)"):
        taken = api.checkpoint(found, timeout_s=timeout_s)
    if output is Output.JSON:
        print_json({"run": found.run_id, "step": taken.step, "path": taken.path, "took_s": taken.took_s})
    else:
        print_text(f"step {taken.step} of {found.run_id} is saved: {taken.path}")
