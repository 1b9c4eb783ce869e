"""The verb `cancel`: end a run."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.output import Output, say, say_json
from holdfast.cli.request import OutputOption, RunArgument


def cancel(
    run: RunArgument = None,
    force: Annotated[
        bool, typer.Option("--force", help="Kill at once: no SIGTERM, no grace; needs no controller.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """End a run.

    Its ranks get SIGTERM, and what is left after `recovery.stop_grace_s` is killed.
    """
    from holdfast import api

    found = api.find_run(run)
    by_controller = api.cancel(found, force=force)
    if output is Output.JSON:
        say_json({"run": found.run, "force": force, "by_controller": by_controller})
    elif not by_controller:
        say(f"{found.run} was ended without its controller, which did not answer: all its processes were killed")
    else:
        say(f"{found.run} was told to end{' at once' if force else ''}")
