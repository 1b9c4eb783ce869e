"""The command `accept`: five acceptance checks of a target, with real runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import LOCAL, OutputOption, SetOption, TargetOption
from holdfast.cli.output import Output, print_json, print_rich, print_text
from holdfast.errors import ExitCode, failure

if TYPE_CHECKING:
    from holdfast.accept.agreement import CheckName
    from holdfast.accept.check_report import CheckReport
    from holdfast.accept.ladder import Rung


def accept(
    checks: Annotated[
        list[str] | None,
        typer.Argument(metavar="CHECK...", help="fabric, scaling, gang, first-run, restart (default: all)."),
    ] = None,
    on: TargetOption = LOCAL,
    agreement: Annotated[
        Path | None, typer.Option("--agreement", metavar="FILE", help="What is measured, and what it must be.")
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Shorten every check: all of them in about three minutes.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="NAME", help="Continue an acceptance that was interrupted.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="File for the report (default: NAME.html).")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Prove with real runs that training works on a target.

    It checks that the fabric is used, that more nodes scale, that jobs get all of their nodes or none, that the
    documented commands work, and that a run recovers from failures exactly. The exit code names the first check that
    failed: 91 fabric, 92 scaling, 93 gang, 94 first-run, 95 restart.
    """
    from holdfast.accept.acceptance import begin, carry_out, load
    from holdfast.accept.acceptance_page import acceptance_page
    from holdfast.accept.agreement import read_agreement
    from holdfast.host.files import atomic_write_shared

    base = Path()
    wanted = _checks(checks or ())
    if to is not None and not to.absolute().parent.is_dir():
        what = f"there is no folder {to.parent}"
        raise failure("no-such-folder", what, exit_code=ExitCode.NOT_FOUND, where=str(to), remedy="Create it first.")
    if resume is not None:
        if wanted or agreement or smoke or on != LOCAL:
            what = "`--resume` continues an acceptance with what was agreed then, on its target"
            remedy = "Leave out the checks, `--on`, `--agreement` and `--smoke`."
            raise failure("bad-usage", what, exit_code=ExitCode.USAGE, remedy=remedy)
        acceptance, folder = load(resume, base=base)
    else:
        acceptance, folder = begin(on, read_agreement(agreement, smoke=smoke), wanted, base=base)
    quiet = output is Output.JSON
    if not quiet:
        print_text(f"accepting {acceptance.target}; if interrupted: holdfast accept --resume {acceptance.name}")
    acceptance = carry_out(
        acceptance,
        folder,
        base=base,
        log=(lambda line: None) if quiet else lambda line: print_text(f"  {line}"),
        show=(lambda report: None) if quiet else _print_report,
    )
    path = to or Path(f"{acceptance.name}.html")
    atomic_write_shared(path, acceptance_page(acceptance).encode())
    if quiet:
        print_json(acceptance)
    else:
        print_text(f"\nreport: {path}")
    raise typer.Exit(acceptance.exit_code)


def accept_ladder(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with a job file for each rung.")] = Path(
        "examples/ladder"
    ),
    on: TargetOption = LOCAL,
    overrides: SetOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Compare job files that add one thing each.

    Each trains the same model: a launcher, an orchestrator, fault tolerance, a fast fabric, a queue. It prints time,
    loss, MFU, tokens/s, TFLOP/s, gradient norm and memory of each, and the time of a step relative to the first. A job
    that the target cannot run, or of which it ignores a field, is left out with the reason.
    """
    import os

    from holdfast.accept.agreement import Agreement
    from holdfast.accept.ladder import climb, read_rungs
    from holdfast.accept.site import Site
    from holdfast.fabric.catalog import NAMES
    from holdfast.job.targets import find_target
    from holdfast.launch.target import TARGET_KINDS

    files = read_rungs(folder)
    spec = find_target(on, start=folder, environ=os.environ, fabrics=NAMES, kinds=TARGET_KINDS)
    quiet = output is Output.JSON
    log: Callable[[str], object] = str if quiet else print_text
    site = Site(target=on, spec=spec, base=folder, folder=folder, agreement=Agreement(), log=log)
    rungs = climb(files, site, overrides=overrides or (), show=lambda rung: log(f"  {rung.name}: {rung.status}"))
    if quiet:
        print_json({"target": on, "rungs": rungs})
    else:
        _print_ladder(rungs)
    raise typer.Exit(ExitCode.LADDER_NOT_ACCEPTED if any(rung.has_failed for rung in rungs) else ExitCode.OK)


def _print_ladder(rungs: Sequence[Rung]) -> None:
    from rich.table import Table

    from holdfast.accept.ladder import HEAD, row

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in HEAD:
        table.add_column(heading)
    for rung in rungs:
        table.add_row(*row(rung))
    print_rich(table)
    for rung in rungs:
        if rung.why:
            print_text(f"{rung.name}: {rung.status}: {rung.why}")


def _checks(names: list[str] | tuple[()]) -> tuple[CheckName, ...]:
    from holdfast.accept.agreement import CheckName

    known = {str(check) for check in CheckName}
    if unknown := [name for name in names if name not in known]:
        what = f"there is no check {unknown[0]!r}"
        remedy = f"Choose one of {', '.join(CheckName)}."
        raise failure("no-such-check", what, exit_code=ExitCode.USAGE, remedy=remedy)
    return tuple(CheckName(name) for name in names)


def _print_report(report: CheckReport) -> None:
    from rich.table import Table
    from rich.text import Text

    from holdfast.accept.check_report import Verdict
    from holdfast.cli.finding_text import render_finding
    from holdfast.report.formatting import duration

    style = {Verdict.PASSED: "bold green", Verdict.FAILED: "bold red", Verdict.NOT_APPLICABLE: "dim"}[report.verdict]
    print_rich(Text.assemble((f"{report.check}: ", "bold"), (report.verdict, style), f" in {duration(report.took_s)}"))
    table = Table(box=None, pad_edge=False, show_header=False)
    for figure in report.figures:
        agreed = f"agreed: {figure.agreed}{'' if figure.met else ', missed'}" if figure.agreed else ""
        table.add_row(f"  {figure.name}", figure.value, Text(agreed, style="dim" if figure.met else "red"))
    if report.figures:
        print_rich(table)
    if report.finding is not None:
        print_rich(render_finding(report.finding))
