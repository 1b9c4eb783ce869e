"""Prints the diagnosis of a failed run after its summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import api
from holdfast.cli.diagnose import render_diagnosis
from holdfast.cli.error_report import report_error
from holdfast.cli.output import Output, print_json, print_rich, print_text
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.diagnose.diagnosis import Diagnosis


def diagnose_failed_run(run: RunDir, output: Output) -> Diagnosis | None:
    """Diagnose a failed run; prints a note and returns None if the diagnosis itself fails."""
    try:
        return api.diagnose_run(run)
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
    print_text(f"\n`holdfast diagnose {run.run_id}` says it again: `-o json` for machines, `--redact` for sharing")
