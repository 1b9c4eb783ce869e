"""The verb `cancel`: end a run."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common_options import OutputOption, RunArgument
from holdfast.cli.output import Output, print_json, print_text


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
        print_json({"run": found.run_id, "force": force, "by_controller": by_controller})
    elif not by_controller:
        print_text(
            f"{found.run_id} was ended without its controller, which did not answer: all its processes were killed"
        )
    else:
        print_text(f"{found.run_id} was told to end{' at once' if force else ''}")
