"""The command `review`: the four artefacts of a design review from one job file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import LOCAL, FileArgument, OutputOption, SetOption, TargetOption, job_from_args
from holdfast.cli.output import Output, print_json, print_rich, print_text
from holdfast.errors import ExitCode, failure

if TYPE_CHECKING:
    from holdfast.plan.review import Difference, Review


def review(
    file: FileArgument = None,
    on: TargetOption = LOCAL,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="Another job file; shows what differs.")
    ] = None,
    overrides: SetOption = None,
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="NAME", help="Kind of machine (default: the target's).")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", metavar="FILE", help="Measured rates of the machines, as JSON.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show what a design review of a job asks for.

    These are parallelism layout, job template, network and placement assumptions, and recovery plan. Each line is
    predicted, measured or assumed, with what would prove it. With `template: production` an incomplete review is an
    error. Starts nothing.
    """
    from holdfast import api
    from holdfast.job.targets import ManifestTemplate
    from holdfast.plan.review import differences

    loaded, base = job_from_args(file, (), overrides)
    found = api.review(loaded, on, base=base, machine=machine, calibration=calibration)
    differing = None
    if against is not None:
        other, other_base = job_from_args(against, (), overrides)
        compared = api.review(other, on, base=other_base, machine=machine, calibration=calibration)
        differing = differences(found, compared)
    if output is Output.JSON:
        print_json({"review": found, "missing": found.missing, "differences": differing})
    else:
        _print_review(found)
        if differing is not None:
            _print_differences(differing)
    if found.missing and found.template is ManifestTemplate.PRODUCTION:
        raise failure(
            "review-incomplete",
            f"`template: production` of target `{on}` needs a complete review of job `{found.job}`",
            exit_code=ExitCode.INVALID_JOB,
            where=f"target {on}",
            evidence=found.missing,
            remedy="Add what is missing to the job or the target.",
        )


def _print_review(found: Review) -> None:
    from rich.table import Table

    for artefact in found.artefacts:
        table = Table(box=None, pad_edge=False, header_style="dim", title=artefact.kind, title_justify="left")
        for heading in ("", "", "standing", "proof"):
            table.add_column(heading)
        for line in artefact.lines:
            proof = f"to prove: {line.proof}" if line.standing == "assumed" else line.proof
            table.add_row(line.name, line.value, line.standing, proof)
        for why in artefact.missing:
            table.add_row("missing", why, "", "")
        print_rich(table)
        print_text("")
    print_text(f"`template: {found.template}` does not ensure:")
    for each in found.not_guaranteed:
        print_text(f"- {each}")


def _print_differences(differing: tuple[Difference, ...]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("differs", "this job", "--against"):
        table.add_column(heading)
    for each in differing:
        table.add_row(f"{each.kind}: {each.name}", each.value or "-", each.other or "-")
    print_text("")
    print_rich(table)
