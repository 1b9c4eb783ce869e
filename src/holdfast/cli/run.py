"""The verb `run`: start a job and stay with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import (
    LOCAL,
    FileArgument,
    GpusOption,
    NameOption,
    NodesOption,
    OutputOption,
    RanksOption,
    SetOption,
    TargetOption,
    job_from_args,
)
from holdfast.cli.output import Output, print_json, print_text
from holdfast.errors import ExitCode

if TYPE_CHECKING:
    from holdfast.findings import Finding


def run(
    ctx: typer.Context,
    file: FileArgument = None,
    on: TargetOption = LOCAL,
    overrides: SetOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return as soon as the run is under way.")] = False,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    ranks_per_node: RanksOption = None,
    name: NameOption = None,
    show: Annotated[
        str,
        typer.Option(
            "--show", metavar="RANKS", help="Whose output goes to a pipe or file: 0 (the default), 0-7,12, all, none."
        ),
    ] = "0",
    output: OutputOption = Output.TEXT,
) -> None:
    """Start a job and show it until it ends.

    The job is a file, a Python script with its arguments, or a command after `--`. The exit code is the job's. Ctrl-C
    once ends the run gently, twice at once. Closing the terminal leaves it running.
    """
    if on != LOCAL:
        from holdfast.launch.kubernetes.submit.submit_process import prestart

        prestart()  # before what takes as long to import as its client does
    from holdfast import api
    from holdfast.cli.interrupts import InterruptCounter

    loaded, base = job_from_args(
        file,
        ctx.obj,
        overrides,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks_per_node,
        name=name,
    )
    if show not in ("all", "none"):
        from holdfast.cli.logs import parse_ranks

        parse_ranks(show, loaded.job, f"job `{loaded.job.name}`", "--show")
    with InterruptCounter() as presses:
        started = api.start(loaded, on, base=base, on_findings=lambda findings: _tell(findings, output))
        if presses.count or not detach:
            from holdfast.cli.follow import cancel_on_interrupt, follow_run  # the run begins while this is loaded

            code = follow_run(started, output, cancel_on_interrupt(started), presses, ranks=show)
            raise typer.Exit(ExitCode.CANCELLED if code is None else code)
    if output is Output.JSON:
        print_json({"run": started.run_id, "folder": str(started.path)})
    else:
        print_text(f"{started.run_id} is under way; `holdfast attach` shows it, `holdfast cancel` ends it")


def _tell(findings: Sequence[Finding], output: Output) -> None:
    from holdfast.cli.finding_text import print_findings  # few starts have something to say

    print_findings(findings, output)
