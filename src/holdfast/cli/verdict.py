"""Owns what is said of a run that has failed once it is over: why, as the last thing on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import api
from holdfast.cli.diagnose import told
from holdfast.cli.failures import report
from holdfast.cli.output import Output, say, say_json, show
from holdfast.folder import RunFolder

if TYPE_CHECKING:
    from holdfast.diagnose.answer import Answer


def verdict(run: RunFolder, output: Output) -> Answer | None:
    """Why a run failed; None where that could not be found out, which is said."""
    try:
        return api.diagnose_run(run)
    except Exception as error:  # the exit code is the job's, whatever becomes of the telling
        report(error, ("-o", output))
        return None


def print_verdict(run: RunFolder, answer: Answer, output: Output) -> None:
    """Say it."""
    if output is Output.JSON:
        from holdfast.diagnose.answer import document

        say_json({"type": "diagnosis", "run": run.run, "answer": document(answer)})
        return
    say("")
    show(told(answer))
    say(f"\n`holdfast diagnose {run.run}` says it again: `-o json` for machines, `--redact` for sharing")
