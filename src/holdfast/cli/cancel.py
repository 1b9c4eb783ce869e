"""The command `cancel`: stop a run."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common_options import OutputOption, RunArgument
from holdfast.cli.output import Output, print_json, print_text


def cancel(
    run: RunArgument = None,
    force: Annotated[
        bool, typer.Option("--force", help="Send SIGKILL without a grace period; works without a controller.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Stop a run.

    Its ranks get SIGTERM; ranks still alive after `recovery.stop_grace_s` get SIGKILL.
    """
    from holdfast import api

    found = api.find_run(run)
    by_controller = api.cancel(found, force=force)
    if output is Output.JSON:
        print_json({"run": found.run_id, "force": force, "by_controller": by_controller})
    elif not by_controller:
        print_text(f"{found.run_id} was killed without its controller, which did not answer")
    else:
        print_text(f"{found.run_id} is {'being killed' if force else 'stopping'}")
