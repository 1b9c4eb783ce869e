"""Owns how the end of a run, or how far it is, is printed: the summary's words with a little colour."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from rich.text import Text

from holdfast import api
from holdfast.cli.output import Output, say_json, show, with_properties
from holdfast.events import Outcome
from holdfast.folder import RunFolder
from holdfast.report.summary import Heading, Summary, tell

_STYLES = {Outcome.SUCCEEDED: "bold green", Outcome.FAILED: "bold red", Outcome.CANCELLED: "bold yellow"}


def document(summary: Summary) -> dict[str, object]:
    """The summary as JSON."""
    account = with_properties(summary.account, "ettr")
    recoveries = [with_properties(recovery, "redone_steps") for recovery in summary.recoveries]
    return with_properties(summary) | {"account": account, "recoveries": recoveries}


def print_summary(run: RunFolder, output: Output, *, advice: bool = True) -> None:
    """Say how a run went; without `advice` where a diagnosis follows, which has its own."""
    summary = api.summary(run)
    if output is Output.JSON:
        say_json(document(summary))
        return
    if summary.finding and not advice:
        summary = replace(summary, finding=msgspec.structs.replace(summary.finding, remedy=""))
    text = Text(tell(summary))
    headline = text.plain.partition("\n")[0]
    text.stylize(_STYLES.get(summary.outcome, "bold") if summary.outcome else "bold", 0, len(headline))
    for heading in Heading:
        text.highlight_regex(rf"(?m)^{heading}", "bold")
    show(text)
