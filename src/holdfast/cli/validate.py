"""The command `validate`: list every problem of job files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import DEFAULT_FILE, LOCAL, OutputOption, SetOption, TargetOption, job_from_args
from holdfast.cli.output import Output, print_json, print_rich, print_text
from holdfast.errors import ExitCode, HoldfastError

if TYPE_CHECKING:
    from holdfast.findings import Finding


def validate(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help="Job files (default: job.yaml).")
    ] = None,
    on: TargetOption = LOCAL,
    overrides: SetOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List every problem of job files.

    Reports all problems in one pass, each with its line and remedy. Starts nothing.
    """
    worst = ExitCode.OK
    answers: list[dict[str, object]] = []
    for file in files or [DEFAULT_FILE]:
        findings, code = _examine(file, on, overrides)
        worst = worst or code
        if output is Output.JSON:
            answers.append({"file": str(file), "valid": code is ExitCode.OK, "findings": findings})
        else:
            _print(file, findings, code)
    if output is Output.JSON:
        print_json(answers)
    raise typer.Exit(worst)


def _examine(file: Path, on: str, overrides: list[str] | None) -> tuple[tuple[Finding, ...], ExitCode]:
    """The findings of one file, and the exit code if it were the only one."""
    from holdfast import api
    from holdfast.findings import Severity

    try:
        loaded, base = job_from_args(file, (), overrides)
        findings = api.check(loaded, on, base=base)
    except HoldfastError as error:
        return error.findings, error.exit_code
    impossible = any(finding.severity is Severity.ERROR for finding in findings)
    return findings, ExitCode.CANNOT_RUN_HERE if impossible else ExitCode.OK


def _print(file: Path, findings: tuple[Finding, ...], code: ExitCode) -> None:
    from holdfast.cli.finding_text import render_findings

    if findings:
        print_rich(render_findings(findings))
    print_text(f"{file}: {'can run' if code is ExitCode.OK else 'cannot run'}")
