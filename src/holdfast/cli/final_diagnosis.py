"""Owns what is said of a run that has failed once it is over: why, as the last thing on the screen."""

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
    """Why a run failed; None where that could not be found out, which is said."""
    try:
        return api.diagnose_run(run)
    except Exception as error:  # the exit code is the job's, whatever becomes of the telling
        report_error(error, ("-o", output))
        return None


def print_diagnosis(run: RunDir, answer: Diagnosis, output: Output) -> None:
    """Say it."""
    if output is Output.JSON:
        from holdfast.diagnose.diagnosis import to_dict

        print_json({"type": "diagnosis", "run": run.run_id, "diagnosis": to_dict(answer)})
        return
    print_text("")
    print_rich(render_diagnosis(answer))
    print_text(f"\n`holdfast diagnose {run.run_id}` says it again: `-o json` for machines, `--redact` for sharing")
