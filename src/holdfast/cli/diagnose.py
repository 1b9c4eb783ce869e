"""The command `diagnose`: root cause, first failed rank, confidence, and remedy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import LOCAL, OutputOption, RunTargetOption
from holdfast.cli.output import Output, console, print_json, print_rich, print_text

if TYPE_CHECKING:
    from rich.text import Text

    from holdfast.diagnose.diagnosis import Diagnosis, Evidence
    from holdfast.diagnose.nccl_transport import TransportReport
    from holdfast.run_dir import RunDir

_LABEL_WIDTH = 14
_LINE_CHARS = 300
_LEAST_CHARS = 60
"""Characters shown of a log line, regardless of the terminal's width."""


def diagnose(
    where: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH|RUN|-", help="Log files or folders, - for standard input, or a run id."),
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Replace hosts, addresses, paths, users and secrets with placeholders.")
    ] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Of a slow run: dump all ranks' stacks five times, and compare them.")
    ] = False,
    native: Annotated[
        bool, typer.Option("--native", help="Of a live run: dump all ranks' stacks once, with frames of C and C++.")
    ] = False,
    on: RunTargetOption = LOCAL,
    output: OutputOption = Output.TEXT,
) -> None:
    """Find what failed first, on which rank, and what to do.

    Reads logs of torch, NCCL, Gloo, launchers, the kernel, Kubernetes and Slurm, compressed or not, one file per rank
    or all in one. The default is the latest run. If the logs do not determine the cause, the answer is "unknown",
    with the fact that would and how to get it. The exit code is 0 either way.
    """
    from holdfast import api
    from holdfast.diagnose.diagnosis import to_dict
    from holdfast.diagnose.redact import Redactor, redact_diagnosis

    redactor = Redactor() if redact else None
    hide = redactor.secrets if redactor else None
    names = where or []
    if native:
        found = api.find_run(names[0] if names else None, on)
        with console(stderr=True).status(f"dumping the stacks of {found.run_id} with native frames"):
            answer = api.diagnose_native_stacks(found, hide=hide)
    elif stacks:
        found = api.find_run(names[0] if names else None, on)
        with console(stderr=True).status(f"dumping the stacks of {found.run_id} five times"):
            answer = api.diagnose_running_ranks(found, hide=hide)
    elif len(names) <= 1 and not any(name == "-" or os.path.exists(name) for name in names) and not _is_path(names):
        answer = api.diagnose_run(api.find_run(names[0] if names else None, on), hide=hide)
    else:
        answer = api.diagnose([Path(name) for name in names], stdin=sys.stdin.buffer, hide=hide)
    if redactor:
        answer = redact_diagnosis(answer, redactor)
    if output is Output.JSON:
        print_json(to_dict(answer))
    else:
        print_rich(render_diagnosis(answer))


def _is_path(names: list[str]) -> bool:
    """Whether a name that is neither a file nor a possible run id was meant as a path."""
    return any("/" in name or "." in name for name in names)


def render_diagnosis(answer: Diagnosis) -> Text:
    """Format a diagnosis for the terminal."""
    from rich.text import Text

    return Text("\n").join(_rows(answer))


def _rows(answer: Diagnosis) -> Iterator[Text]:
    from rich.text import Text

    from holdfast.diagnose.failure_classes import FailureClass
    from holdfast.report.formatting import sanitize

    known = answer.failure_class is not FailureClass.UNKNOWN
    failed = known or bool(answer.code or answer.next_evidence)
    style = "bold red" if known else "bold yellow" if failed else "bold green"
    yield Text.assemble((sanitize(answer.what, _LINE_CHARS), style))
    if failed:
        verdict = (
            f"{answer.failure_class}, {answer.confidence}"
            if known
            else "unknown: what was read does not decide the cause"
        )
        yield _row("class", verdict)
    if known:
        yield _row("", answer.failure_class.description)
    elif answer.may_be:
        yield _row("may be", ", ".join(answer.may_be))
    if answer.first_failure and str(answer.first_failure):
        yield _row("first", sanitize(str(answer.first_failure)))
    yield from _lines("evidence", answer.evidence)
    if answer.last_lines:
        yield _row("last lines", f"of {sanitize(answer.last_lines[0].where)}:")
        for each in answer.last_lines:
            yield _row("", f"| {sanitize(each.text, _LINE_CHARS)}")
    for number, each in enumerate(answer.symptoms):
        times = f" ({each.count} lines)" if each.count > 1 else ""
        yield _row(
            "" if number else "only follows",
            f"{sanitize(each.message, _LINE_CHARS)}{times}  {sanitize(each.first.where)}",
        )
    for number, step in enumerate(answer.remedy):
        yield _row("" if number else "what to do", sanitize(step, _LINE_CHARS))
    for number, each in enumerate(answer.next_evidence):
        yield _row("" if number else ("to be sure" if known else "would decide"), sanitize(each.what, _LINE_CHARS))
        yield _row("", f"  {sanitize(each.how, _LINE_CHARS)}")
    yield from _lines("also seen", answer.also_seen)
    for number, each in enumerate(answer.other_runs):
        ended = sanitize(f"{each.what} ({each.failure_class})", _LINE_CHARS)
        yield _row("" if number else "other runs", f"{each.ended_at}  {ended}  {sanitize(each.first.where)}".strip())
    if answer.transport is not None:
        yield from _fabric(answer, answer.transport)
    for number, note in enumerate(answer.notes):
        yield _row("" if number else "note", sanitize(note, _LINE_CHARS))


def _fabric(answer: Diagnosis, transport: TransportReport) -> Iterator[Text]:
    """The fabric: a short summary next to another failure, the full report without one."""
    from rich.text import Text

    from holdfast.diagnose.nccl_transport import format_transport
    from holdfast.report.formatting import sanitize

    blame = answer.code.startswith("fabric-") or not answer.evidence
    lines = format_transport(transport) if blame else format_transport(transport)[:1]
    yield Text("")
    for line in lines:
        yield Text(sanitize(line, _LINE_CHARS))
    if not blame:
        yield _row("", "`-o json` has the whole matrix of transports")


def _lines(label: str, evidence: tuple[Evidence, ...]) -> Iterator[Text]:
    from holdfast.report.formatting import sanitize

    width = console().width - _LABEL_WIDTH - len("   : ")
    for number, each in enumerate(evidence):
        where = sanitize(each.where)
        room = min(_LINE_CHARS, max(_LEAST_CHARS, width - len(where)))
        yield _row("" if number else label, f"{where}: {sanitize(each.text, room)}")


def _row(label: str, text: str) -> Text:
    from rich.text import Text

    return Text.assemble((f"  {label:<{_LABEL_WIDTH}}", "dim"), text)


def diagnose_failed_run(run: RunDir, output: Output) -> Diagnosis | None:
    """Diagnose a failed run; None if it never had ranks. Prints a note and returns None if the diagnosis fails."""
    from holdfast import api
    from holdfast.cli.error_report import report_error
    from holdfast.events import AttemptStarted

    try:
        had_ranks = any(isinstance(event, AttemptStarted) for event in api.events(run))
        return api.diagnose_run(run) if had_ranks else None
    except Exception as error:  # a failed diagnosis must not change the exit code, which is the job's
        report_error(error, ("-o", output))
        return None


def print_diagnosis(run: RunDir, answer: Diagnosis, output: Output) -> None:
    """Print the diagnosis."""
    if output is Output.JSON:
        from holdfast.diagnose.diagnosis import to_dict

        print_json({"type": "diagnosis", "run": run.run_id, "diagnosis": to_dict(answer)})
        return
    print_text("")
    print_rich(render_diagnosis(answer))
    print_text(f"\n`holdfast diagnose {run.run_id}` prints this again: `-o json` for machines, `--redact` for sharing")
