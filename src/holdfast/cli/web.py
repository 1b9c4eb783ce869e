"""The command `web`: the live page of runs."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common_options import LOCAL, RunArgument, RunTargetOption
from holdfast.cli.output import Output, print_text

PORT = 9852


def web(
    run: RunArgument = None,
    on: RunTargetOption = LOCAL,
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="0: any free port.")] = PORT,
    browser: Annotated[bool, typer.Option("--open", help="Open it in a browser on this machine.")] = False,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Let the page cancel, checkpoint, update and drill runs.")
    ] = False,
) -> None:
    """Serve a live page of runs to a browser on this machine.

    It shows progress, where time goes, each rank's state and output, failures and what to do. It changes nothing
    without `--allow-actions`. From another machine, forward the port: `ssh -L 9852:127.0.0.1:9852 HOST`.
    """
    from holdfast import api
    from holdfast.cli.finding_text import print_findings
    from holdfast.cli.page_actions import page_actions

    found = api.find_run(run, on)
    print_findings(api.run_problems(found), Output.TEXT)
    api.serve_web(
        found.run_id,
        port=port,
        open_browser=browser,
        actions=page_actions() if allow_actions else (),
        ready=lambda address: print_text(f"{address}\nCtrl-C ends it"),
    )
