"""Formats findings: what, where, evidence, remedy, owner."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from holdfast.cli.output import Output, print_stderr, to_json
from holdfast.findings import OWNER_TEXT, Finding, Owner, Severity
from holdfast.report.formatting import duration, sanitize

if TYPE_CHECKING:
    from holdfast.report.run_status import RunStatus

_STYLES: dict[Severity, str] = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_LABEL_WIDTH = 12


def render_finding(finding: Finding, age_s: float | None = None) -> Text:
    """Format a finding on several lines, without a final newline; `age_s` adds its age."""
    style = _STYLES[finding.severity]
    ago = "" if age_s is None else f", {duration(age_s)} ago"
    words = f"{ago}: {sanitize(finding.what)}"
    head = Text.assemble((finding.severity.value, style), words, (f"  [{sanitize(finding.code)}]", "dim"))
    return Text("\n").join([head, *_rows(finding)])


def render_findings(findings: Iterable[Finding]) -> Text:
    """Format several findings."""
    return join_blocks(map(render_finding, findings))


def join_blocks(blocks: Iterable[Text]) -> Text:
    """Join blocks with newlines."""
    return Text("\n\n").join(blocks)


def render_recent(status: RunStatus, now: float, *, most: int = 0) -> list[Text]:
    """The latest findings of a run with their age: `most` of them, or all that are kept."""
    recent = list(zip(status.findings, status.findings_at, strict=True))
    return [render_finding(finding, max(0.0, now - at)) for finding, at in recent[-most:]]


def print_findings(findings: Sequence[Finding], output: Output) -> None:
    """Print findings to standard error; standard output holds only the command's result."""
    if output is Output.JSON:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{to_json({'findings': findings})}\n")
    elif findings:
        print_stderr(render_findings(findings))


def _rows(finding: Finding) -> Iterator[Text]:
    if finding.where:
        yield row("where", sanitize(finding.where))
    for number, line in enumerate(finding.evidence):
        yield row("" if number else "evidence", sanitize(line))
    if finding.remedy:
        yield row("what to do", sanitize(finding.remedy))
    if finding.owner is not Owner.USER:
        yield row("fixable by", OWNER_TEXT[finding.owner])


def row(label: str, text: str) -> Text:
    """Format one labelled line below a finding."""
    return Text.assemble((f"  {label:<{_LABEL_WIDTH}}", "dim"), text)
