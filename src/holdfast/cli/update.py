"""The command `update`: switch a run to new code at its current step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common_options import OutputOption, RunArgument
from holdfast.cli.output import Output, console, print_json, print_text
from holdfast.errors import ExitCode, failure

NOW, RESTART = "now", "restart"


def update(
    run: RunArgument = None,
    code: Annotated[
        Path | None, typer.Option("--code", metavar="DIR", help="Folder of the new code (default: the job's).")
    ] = None,
    when: Annotated[
        str,
        typer.Option(
            "--when",
            metavar="now|restart|SECONDS",
            help="Immediately, at the next restart, or at the next restart but within SECONDS.",
        ),
    ] = NOW,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long to wait for the first step.")
    ] = 600.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Switch a run to new code at its current step.

    Nodes stay, and the old processes transfer their state to the new ones in memory. Code that fails within ten steps
    is rolled back.
    """
    from holdfast import api
    from holdfast.report.formatting import short_digest

    after_s = _after_s(when)
    found = api.find_run(run)
    with console(stderr=True).status(f"updating the code of {found.run_id} (timeout {timeout_s:g} s)"):
        updated = api.update(found, code=code, after_s=after_s, timeout_s=timeout_s)
    if output is Output.JSON:
        step = updated.step.step if updated.step else None
        print_json({"run": found.run_id, "code": updated.digest, "former": updated.previous_digest, "step": step})
        return
    what = (
        f"code {short_digest(updated.digest)} in place of {short_digest(updated.previous_digest)}"
        if updated.digest
        else "the code in place"
    )
    if updated.step is not None:
        print_text(f"{found.run_id} continues with {what}: step {updated.step.step} is done")
    else:
        late = "" if after_s is None else f", or in {after_s:g} s at the latest"
        print_text(f"{found.run_id} continues with {what} from its next restart{late}")


def _after_s(when: str) -> float | None:
    """Parse `--when`; None waits for the next restart."""
    if when in (NOW, RESTART):
        return 0.0 if when == NOW else None
    try:
        after_s = float(when)
    except ValueError:
        after_s = -1.0
    if not 0 <= after_s < float("inf"):
        what = f"`--when {when}` is no time for an update"
        raise failure("bad-when", what, exit_code=ExitCode.USAGE, remedy="Write now, restart, or a number of seconds.")
    return after_s
