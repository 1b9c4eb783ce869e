"""Prints the summary of a run."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace
from rich.text import Text

from holdfast import api
from holdfast.cli.output import Output, print_json, print_rich, with_properties
from holdfast.events import Outcome
from holdfast.report.run_summary import Heading, RunSummary, format_summary
from holdfast.run_dir import RunDir

_STYLES = {Outcome.SUCCEEDED: "bold green", Outcome.FAILED: "bold red", Outcome.CANCELLED: "bold yellow"}


def summary_document(summary: RunSummary) -> dict[str, object]:
    """The summary as JSON."""
    account = with_properties(summary.account, "ettr", "most_ettr")
    recoveries = [with_properties(recovery, "recomputed_steps") for recovery in summary.recoveries]
    return with_properties(summary) | {"account": account, "recoveries": recoveries}


def print_summary(run: RunDir, output: Output, *, advice: bool = True) -> None:
    """Print the summary of a run; without `advice` if a diagnosis with its own remedy follows."""
    summary = api.summary(run)
    if output is Output.JSON:
        print_json(summary_document(summary))
        return
    if summary.finding and not advice:
        summary = replace(summary, finding=msgspec.structs.replace(summary.finding, remedy=""))
    text = Text(format_summary(summary))
    headline = text.plain.partition("\n")[0]
    text.stylize(_STYLES.get(summary.outcome, "bold") if summary.outcome else "bold", 0, len(headline))
    for heading in Heading:
        text.highlight_regex(rf"(?m)^{heading}", "bold")
    print_rich(text)
