"""The command `check`: whether a target meets a job's requirements."""

from __future__ import annotations

import typer

from holdfast.cli.common_options import (
    DEFAULT_FILE,
    LOCAL,
    FileArgument,
    OutputOption,
    SetOption,
    TargetOption,
    job_from_args,
)
from holdfast.cli.output import Output, print_json, print_rich, print_text
from holdfast.errors import ExitCode


def check(
    file: FileArgument = None,
    on: TargetOption = LOCAL,
    overrides: SetOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List what a target lacks for a job.

    On a cluster it queries installed components, health and permissions; it creates nothing. Without a job file, it
    checks for the smallest job.
    """
    from pathlib import Path

    from holdfast import api
    from holdfast.cli.finding_text import render_findings
    from holdfast.findings import Severity

    wanted = file is not None or overrides or DEFAULT_FILE.exists()
    loaded, base = job_from_args(file, (), overrides) if wanted else (None, Path())
    findings = api.check_target(loaded, on, base=base)
    lacking = any(finding.severity is Severity.ERROR for finding in findings)
    if output is Output.JSON:
        print_json({"target": on, "can_run": not lacking, "findings": findings})
    else:
        if findings:
            print_rich(render_findings(findings))
        print_text(f"{on}: {'cannot run' if lacking else 'can run'} {loaded.job.name if loaded else 'a job'}")
    raise typer.Exit(ExitCode.CANNOT_RUN_HERE if lacking else ExitCode.OK)
