"""The command `nodes`: the machines of a target, which of them runs avoid, and their release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import LOCAL, OutputOption, TargetOption
from holdfast.cli.output import Output, print_json, print_rich, print_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.findings import Finding
    from holdfast.launch.target_machines import MachineStatus

HEADINGS = ("machine", "state", "used by", "why")


def nodes(
    on: TargetOption = LOCAL,
    release: Annotated[
        str | None, typer.Option("--release", metavar="NODE", help="Let runs use this machine again.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List a target's machines: in use, free, or quarantined.

    Runs avoid a machine that an earlier run found to be at fault, until its quarantine ends or --release ends it.
    """
    from rich.table import Table

    from holdfast import api

    if release is not None:
        findings = api.release_machine(release, on)
        _print(output, {"target": on, "released": release}, f"{release} released: runs on {on} may use it", findings)
        return
    found = api.machines(on)
    if output is Output.JSON:
        document = {"target": on, "limit": found.limit, "machines": found.machines}
        print_json(document | {"findings": found.findings})
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=heading == "machine")
    for machine in found.machines:
        table.add_row(*_cells(machine))
    print_rich(table)
    bad = sum(machine.quarantine is not None for machine in found.machines)
    if bad:
        print_text(f"{bad} of {len(found.machines)} quarantined, {found.limit} at most")
    _print_findings(found.findings)


def _cells(machine: MachineStatus) -> tuple[str, ...]:
    from holdfast.job.quarantine_text import utc

    row = machine.quarantine
    if row is None:
        return machine.name, machine.state.value, ", ".join(machine.runs), machine.note
    again = f" ({row.times} times in a row)" if row.times > 1 else ""
    evidence = f": {row.evidence[0]}" if row.evidence else ""
    why = f"{row.code} in {row.run}{again}{evidence}"
    return machine.name, f"{machine.state.value} until {utc(row.until)}", ", ".join(machine.runs), why


def _print(output: Output, document: dict[str, object], text: str, findings: Sequence[Finding]) -> None:
    if output is Output.JSON:
        print_json(document | {"findings": findings})
    else:
        print_text(text)
        _print_findings(findings)


def _print_findings(findings: Sequence[Finding]) -> None:
    from holdfast.cli.finding_text import render_findings

    if findings:
        print_rich(render_findings(tuple(findings)))
