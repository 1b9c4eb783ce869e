"""The command `check`: whether a target meets a job's requirements, and whether its nodes are healthy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

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
    from rich.text import Text

    from holdfast.events import AnyEvent, NodeChecked
    from holdfast.events.probe_results import ProbeResult
    from holdfast.findings import CheckResult, Finding
    from holdfast.preflight.node_reports import NodeReports

NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", "-N", min=1, help="Also check this many nodes, by a run that does nothing else."),
]
FullOption = Annotated[
    bool, typer.Option("--full", help="Also load GPUs and network of these nodes, and measure them: up to 3 minutes.")
]
MAX_STORAGE_ROWS = 16
_OUTCOMES = {"passed": ("pass", ""), "failed": ("FAIL", "bold red"), "not-looked-at": ("not looked at", "dim")}
"""The word of each outcome, and its style."""


def check(
    file: FileArgument = None,
    on: TargetOption = LOCAL,
    nodes: NodesOption = None,
    full: FullOption = False,
    overrides: SetOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List what a target and its nodes lack for a job.

    On a cluster it queries installed components, health and permissions. It creates nothing, but with `--nodes` or
    `--full` a run that does nothing but check its nodes. Without a job file, it checks for the smallest job.
    """
    from pathlib import Path

    from holdfast import api
    from holdfast.findings import Severity
    from holdfast.job.spec import CheckLevel

    wanted = file is not None or overrides or DEFAULT_FILE.exists()
    loaded, base = job_from_args(file, (), overrides) if wanted else (None, Path())
    findings = api.check_target(loaded, on, base=base)
    lacking = any(finding.severity is Severity.ERROR for finding in findings)
    level = CheckLevel.FULL if full else CheckLevel.QUICK
    show = _show_progress if full and output is Output.TEXT else None
    wants_nodes = (nodes or full) and not lacking
    reports = api.check_nodes(loaded, on, base=base, nodes=nodes, level=level, on_event=show) if wants_nodes else None
    of_nodes: Mapping[int, NodeChecked | None] = reports.nodes if reports else {}
    lacking = lacking or any(report is None or report.problem for report in of_nodes.values())
    if reports:
        lacking, findings = lacking or not reports.passed, (*findings, *reports.findings)
    if output is Output.JSON:
        probe = {"probe": reports.probe} if reports and reports.probe else {}
        print_json({"target": on, "can_run": not lacking, "findings": findings, "nodes": of_nodes} | probe)
    else:
        if reports:
            print_rich(_table(reports))
            if reports.probe and reports.probe.all_reduce:
                print_rich(_rates(reports.probe, reports.line_rate))
            if reports.probe and reports.probe.storage:
                print_rich(_storage(reports.probe))
        print_verdict(on, (*findings, *_of_nodes(of_nodes)), loaded.job.name if loaded else "a job", lacking=lacking)
    raise typer.Exit(ExitCode.CANNOT_RUN_HERE if lacking else ExitCode.OK)


def print_verdict(on: str, findings: Sequence[Finding], job: str, *, lacking: bool) -> None:
    """The findings, and whether the target can run the job."""
    from holdfast.cli.finding_text import render_findings

    if findings:
        print_rich(render_findings(findings))
    print_text(f"{on}: {'cannot run' if lacking else 'can run'} {job}")


def _show_progress(event: AnyEvent) -> None:
    """A line for each stage of the probes."""
    from holdfast.cli.event_text import describe
    from holdfast.events import ProbeAdvanced

    if isinstance(event, ProbeAdvanced):
        print_text(describe(event))


def _of_nodes(reports: Mapping[int, NodeChecked | None]) -> tuple[Finding, ...]:
    """The findings of all nodes; those that several nodes have alike name them all."""
    from holdfast.events import to_ranges
    from holdfast.report.formatting import format_ranges

    nodes = defaultdict["Finding", list[int]](list)
    for node, report in reports.items():
        for result in report.results if report else ():
            for finding in result.findings:
                nodes[finding].append(node)
    return tuple(
        replace(finding, where=f"{finding.where} on node {format_ranges(to_ranges(on))}".strip())
        for finding, on in nodes.items()
    )


def _table(reports: NodeReports) -> Table:
    """Checks by node; nodes with the same outcomes share a column."""
    from rich.table import Table

    from holdfast.events import to_ranges
    from holdfast.findings import CheckResult
    from holdfast.report.formatting import format_ranges

    columns = defaultdict[tuple[CheckResult, ...] | None, list[int]](list)
    for node, report in reports.nodes.items():
        found = {result.check: result for result in report.results} if report else {}
        column = tuple(replace(found.get(name, CheckResult(check=name)), findings=()) for name in reports.checks)
        columns[column if report else None].append(node)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("check")
    for nodes in columns.values():
        table.add_column(f"node {format_ranges(to_ranges(nodes))}")
    for number, name in enumerate(reports.checks):
        table.add_row(name, *(_cell(column[number] if column else None) for column in columns))
    return table


def _rates(probe: ProbeResult, expected: str) -> Table:
    """The all-reduce over all nodes, by size of the message."""
    from rich.table import Table

    caption = f"all-reduce over all nodes; line rate in Gbit/s: {expected}"
    table = Table(box=None, pad_edge=False, header_style="dim", caption=caption, caption_justify="left")
    for heading in ("all-reduce", "time", "algorithm GB/s", "bus GB/s"):
        table.add_column(heading, justify="left" if heading == "all-reduce" else "right")
    for rate in probe.all_reduce:
        figures = (f"{rate.time_s * 1e3:.3g} ms", f"{rate.algorithm_gb_s:.3g}", f"{rate.bus_gb_s:.3g}")
        table.add_row(f"{rate.size_bytes:,} bytes", *figures)
    return table


def _storage(probe: ProbeResult) -> Table:
    """What the file system of checkpoints gives to each node; of many nodes, to the slowest."""
    from rich.table import Table

    total = sum(each.write_mb_s for each in probe.storage) / 1e3
    shown = sorted(probe.storage, key=lambda each: each.write_mb_s)[:MAX_STORAGE_ROWS]
    of = f"the slowest {len(shown)} of {len(probe.storage)} nodes" if len(shown) < len(probe.storage) else "all nodes"
    caption = f"{shown[0].folder}, by {of} at the same time: {total:.3g} GB/s written together"
    table = Table(box=None, pad_edge=False, header_style="dim", caption=caption, caption_justify="left")
    for heading in ("storage", "write MB/s", "read MB/s", "small write", "files/s"):
        table.add_column(heading, justify="left" if heading == "storage" else "right")
    for each in shown:
        figures = (f"{each.write_mb_s:.3g}", f"{each.read_mb_s:.3g}", f"{each.sync_s * 1e3:.3g} ms")
        table.add_row(f"node {each.node}", *figures, f"{each.files_per_s:.3g}")
    return table


def _cell(result: CheckResult | None) -> Text:
    from rich.text import Text

    if result is None:
        return Text("no report", style="bold red")
    words, style = _OUTCOMES[result.outcome]
    return Text(f"{words}: {result.reason}" if result.reason else words, style=style)
