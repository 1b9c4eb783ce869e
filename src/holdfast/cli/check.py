"""The verb `check`: whether a place has what a job needs."""

from __future__ import annotations

import typer

from holdfast.cli.output import Output, say, say_json, show
from holdfast.cli.request import DEFAULT_FILE, LOCAL, FileArgument, OnOption, OutputOption, SetOption, asked_job
from holdfast.errors import ExitCode


def check(
    file: FileArgument = None,
    on: OnOption = LOCAL,
    overrides: SetOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Say what a place lacks for a job.

    A cluster is asked what is installed, healthy and permitted; nothing is made there. Without a job file, the
    smallest job is tried.
    """
    from pathlib import Path

    from holdfast import api
    from holdfast.cli.findings import blocks
    from holdfast.findings import Severity

    wanted = file is not None or overrides or DEFAULT_FILE.exists()
    loaded, base = asked_job(file, (), overrides) if wanted else (None, Path())
    findings = api.check_place(loaded, on, base=base)
    lacking = any(finding.severity is Severity.ERROR for finding in findings)
    if output is Output.JSON:
        say_json({"profile": on, "can_run": not lacking, "findings": findings})
    else:
        if findings:
            show(blocks(findings))
        say(f"{on}: {'cannot run' if lacking else 'can run'} {loaded.job.name if loaded else 'a job'}")
    raise typer.Exit(ExitCode.IMPOSSIBLE if lacking else ExitCode.OK)
