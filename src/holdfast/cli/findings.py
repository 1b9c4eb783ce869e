"""Owns how a finding looks: what, where, the evidence, what to do, whose fault."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from holdfast.cli.output import Output, as_json, remark
from holdfast.findings import FAULTS, Fault, Finding, Severity
from holdfast.report.words import clean, duration

if TYPE_CHECKING:
    from holdfast.report.status import RunStatus

_STYLES: dict[Severity, str] = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_LABEL_WIDTH = 12


def block(finding: Finding, age_s: float | None = None) -> Text:
    """A finding on a few lines, ending without a newline; with its age, where it is of the past."""
    style = _STYLES[finding.severity]
    ago = "" if age_s is None else f", {duration(age_s)} ago"
    words = f"{ago}: {clean(finding.what)}"
    head = Text.assemble((finding.severity.value, style), words, (f"  [{clean(finding.code)}]", "dim"))
    return Text("\n").join([head, *_rows(finding)])


def blocks(findings: Iterable[Finding]) -> Text:
    """Findings one below the other."""
    return below(map(block, findings))


def below(told: Iterable[Text]) -> Text:
    """Blocks one below the other."""
    return Text("\n\n").join(told)


def past(status: RunStatus, now: float, *, most: int = 0) -> list[Text]:
    """A block for each of the latest findings of a run (`most` of them, or all that are kept), with its age."""
    told = list(zip(status.findings, status.findings_at, strict=True))
    return [block(finding, max(0.0, now - at)) for finding, at in told[-most:]]


def tell(findings: Sequence[Finding], output: Output) -> None:
    """Say findings on standard error, beside whatever else a verb answers."""
    if output is Output.JSON:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{as_json({'findings': findings})}\n")
    elif findings:
        remark(blocks(findings))


def _rows(finding: Finding) -> Iterator[Text]:
    if finding.where:
        yield _row("where", clean(finding.where))
    for number, line in enumerate(finding.evidence):
        yield _row("" if number else "evidence", clean(line))
    if finding.remedy:
        yield _row("what to do", clean(finding.remedy))
    if finding.fault is not Fault.USER:
        yield _row("fault of", FAULTS[finding.fault])


def _row(label: str, text: str) -> Text:
    return Text.assemble((f"  {label:<{_LABEL_WIDTH}}", "dim"), text)
