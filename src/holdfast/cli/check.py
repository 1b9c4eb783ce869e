"""The command `check`: whether a target meets a job's requirements, and whether its nodes are healthy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from rich.table import Table

    from holdfast.events import NodeChecked
    from holdfast.findings import Finding

NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", "-N", min=1, help="Also check this many nodes, by a run that does nothing else."),
]
_MARKS = {"passed": "pass", "failed": "[bold red]FAIL[/]", "not-looked-at": "[dim]not looked at[/]"}


def check(
    file: FileArgument = None,
    on: TargetOption = LOCAL,
    nodes: NodesOption = None,
    overrides: SetOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List what a target lacks for a job; with `--nodes`, check its nodes too.

    On a cluster it queries installed components, health and permissions; it creates nothing without `--nodes`. Without
    a job file, it checks for the smallest job.
    """
    from pathlib import Path

    from holdfast import api
    from holdfast.cli.finding_text import render_findings
    from holdfast.findings import Severity

    wanted = file is not None or overrides or DEFAULT_FILE.exists()
    loaded, base = job_from_args(file, (), overrides) if wanted else (None, Path())
    findings = api.check_target(loaded, on, base=base)
    lacking = any(finding.severity is Severity.ERROR for finding in findings)
    reports: Mapping[int, NodeChecked | None] = {}
    if nodes and not lacking:
        reports = api.check_nodes(loaded, on, base=base, nodes=nodes)
    lacking = lacking or any(report is None or report.problem for report in reports.values())
    if output is Output.JSON:
        print_json({"target": on, "can_run": not lacking, "findings": findings, "nodes": reports})
    else:
        if reports:
            print_rich(_table(reports))
        if shown := (*findings, *_of_nodes(reports)):
            print_rich(render_findings(shown))
        print_text(f"{on}: {'cannot run' if lacking else 'can run'} {loaded.job.name if loaded else 'a job'}")
    raise typer.Exit(ExitCode.CANNOT_RUN_HERE if lacking else ExitCode.OK)


def _of_nodes(reports: Mapping[int, NodeChecked | None]) -> tuple[Finding, ...]:
    """The findings of all nodes; those that several nodes have alike name them all."""
    import msgspec

    from holdfast.events import to_ranges
    from holdfast.report.formatting import format_ranges

    nodes = defaultdict["Finding", list[int]](list)
    for node, report in reports.items():
        for result in report.results if report else ():
            for finding in result.findings:
                nodes[finding].append(node)
    return tuple(
        msgspec.structs.replace(finding, where=f"{finding.where} on node {format_ranges(to_ranges(on))}".strip())
        for finding, on in nodes.items()
    )


def _table(reports: Mapping[int, NodeChecked | None]) -> Table:
    """Checks by node; nodes with the same outcomes share a column."""
    from rich.table import Table

    from holdfast.events import to_ranges
    from holdfast.findings import CheckResult
    from holdfast.preflight.run_checks import QUICK, name_of
    from holdfast.report.formatting import format_ranges

    columns = defaultdict[tuple[tuple[str, str], ...], list[int]](list)
    names = [name_of(check) for check in QUICK]
    for node, report in reports.items():
        found = {result.check: result for result in report.results} if report else {}
        rows = [found.get(name, CheckResult(check=name)) for name in names]
        columns[tuple((row.outcome.value, row.reason) for row in rows) if report else ()].append(node)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("check")
    for nodes in columns.values():
        table.add_column(f"node {format_ranges(to_ranges(nodes))}")
    for number, name in enumerate(names):
        cells = (_cell(*outcomes[number]) if outcomes else "[bold red]no report[/]" for outcomes in columns)
        table.add_row(name, *cells)
    return table


def _cell(outcome: str, reason: str) -> str:
    from rich.markup import escape

    return f"{_MARKS[outcome]}[dim]: {escape(reason)}[/]" if reason else _MARKS[outcome]
