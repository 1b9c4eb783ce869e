"""The commands that follow a run: run starts a job, attach joins one and restarts its controller if it has died."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Self

import typer

from holdfast.cli.common_options import (
    DEFAULT_FILE,
    LOCAL,
    FileArgument,
    GpusOption,
    NameOption,
    NodesOption,
    OutputOption,
    RanksOption,
    RunArgument,
    RunTargetOption,
    SetOption,
    TargetOption,
    complete_run,
    job_from_args,
)
from holdfast.cli.output import Output, print_result, working_after
from holdfast.errors import ExitCode, failure

if TYPE_CHECKING:
    from holdfast.findings import Finding
    from holdfast.run_dir import RunDir


SILENT_S = 1.0
"""Most starts take less, and show nothing."""


def run(
    ctx: typer.Context,
    file: FileArgument = None,
    on: TargetOption = LOCAL,
    overrides: SetOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return as soon as the run has started.")] = False,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    ranks_per_node: RanksOption = None,
    name: NameOption = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Continue a run that is over, with its job, code and checkpoints, by default on its target.",
            autocompletion=complete_run,
        ),
    ] = None,
    if_exists: Annotated[
        str,
        typer.Option(
            "--if-exists",
            metavar="start|attach|refuse",
            help="With a run of this name that has not failed: start another, attach to it, or refuse.",
        ),
    ] = "start",
    show: Annotated[
        str,
        typer.Option(
            "--show",
            metavar="RANKS",
            help="Ranks whose output is printed without a terminal: 0-7,12, all or none.",
        ),
    ] = "0",
    output: OutputOption = Output.TEXT,
) -> None:
    """Start a job and follow it until it ends.

    The job is a file, a Python script with its arguments, or a command after `--`. The exit code is the job's. Ctrl-C
    stops the run, a second Ctrl-C kills it. Closing the terminal leaves it running.
    """
    from holdfast.launch.target import prestart

    prestart(on, start=(file or DEFAULT_FILE).parent, environ=os.environ)  # while the other slow imports run
    from holdfast import api

    if if_exists not in list(api.IfExists):
        raise typer.BadParameter(f"`{if_exists}` is none of {', '.join(api.IfExists)}", param_hint="--if-exists")
    start: Callable[..., RunDir]
    if resume is None:
        loaded, base = job_from_args(
            file, ctx.obj, overrides, nodes=nodes, gpus_per_node=gpus_per_node, ranks_per_node=ranks_per_node, name=name
        )
        job, start = loaded.job, partial(api.start, loaded, on, base=base)
    else:
        _refuse_job(file, ctx.obj)
        former = api.find_run(resume)
        accepted = api.accepted(former)
        job, on = accepted.job, on if _is_given(ctx, "on") else accepted.target
        start = partial(
            api.resume,
            former,
            on,
            overrides=overrides or (),
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            ranks_per_node=ranks_per_node,
            name=name,
        )
    if show not in ("all", "none"):
        from holdfast.cli.logs import parse_ranks

        parse_ranks(show, job, f"job `{job.name}`", "--show")
    with InterruptCounter() as presses:
        packing = f"starting {job.name} on {on}: packing its code, checking and submitting it"
        with working_after(SILENT_S, packing):
            started = start(
                on_findings=lambda findings: _print_findings(findings, output), if_exists=api.IfExists(if_exists)
            )
        if presses.count or not detach:
            from holdfast.cli.follow import cancel_on_interrupt, follow_run  # imported while the run starts

            code = follow_run(started, output, cancel_on_interrupt(started), presses, ranks=show)
            raise typer.Exit(ExitCode.CANCELLED if code is None else code)
    print_result(
        output,
        {"run": started.run_id, "folder": str(started.path)},
        f"{started.run_id} started; `holdfast attach` follows it, `holdfast cancel` stops it",
    )


def _is_given(ctx: typer.Context, option: str) -> bool:
    """Whether the user chose an option's value."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _refuse_job(file: Path | None, command: Sequence[str]) -> None:
    """Raise HoldfastError if a job was given next to a run whose job is continued."""
    if file is not None or command:
        raise failure(
            "resume-and-job",
            "`--resume` continues the job of a run, and another job was given",
            exit_code=ExitCode.USAGE,
            remedy="Leave it out; `--set` changes single fields of the run's job.",
        )


def _print_findings(findings: Sequence[Finding], output: Output) -> None:
    from holdfast.cli.finding_text import print_findings  # most starts have no findings

    print_findings(findings, output)


def attach(run: RunArgument = None, on: RunTargetOption = LOCAL, output: OutputOption = Output.TEXT) -> None:
    """Follow a run until it ends.

    The exit code is the run's. Ctrl-C detaches and leaves the run running. A dead controller is restarted.
    """
    from holdfast import api
    from holdfast.cli.follow import detach_on_interrupt, follow_run

    found = api.find_run(run, on)
    api.restart_controller(found)
    with InterruptCounter() as presses:
        raise typer.Exit(follow_run(found, output, detach_on_interrupt, presses) or ExitCode.OK)


class InterruptCounter:
    """Counts Ctrl-C while a command follows a run, instead of ending the process; the caller decides what each does."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
