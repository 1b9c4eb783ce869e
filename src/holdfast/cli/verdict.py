"""Owns what is said of a run that has failed once it is over: why, as the last thing on the screen."""

from __future__ import annotations

from holdfast import api
from holdfast.cli.diagnose import told
from holdfast.cli.failures import report
from holdfast.cli.output import Output, say, say_json, show
from holdfast.diagnose.answer import document
from holdfast.events import Outcome
from holdfast.folder import RunFolder


def print_verdict(run: RunFolder, output: Output) -> None:
    """Say why a run failed; nothing of one that did not."""
    if api.summary(run).outcome is not Outcome.FAILED:
        return
    try:
        answer = api.diagnose_run(run)
    except Exception as error:  # the exit code is the job's, whatever becomes of the telling
        report(error, ("-o", output))
        return
    if output is Output.JSON:
        say_json({"type": "diagnosis", "run": run.run, "answer": document(answer)})
        return
    say("")
    show(told(answer))
    say(f"\n`holdfast diagnose {run.run}` says it again: `-o json` for machines, `--redact` for sharing")
