"""The commands that send a request to a running run: cancel, checkpoint, update."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common_options import LOCAL, OutputOption, RunArgument, RunTargetOption, WaitOption
from holdfast.cli.output import Output, console, print_result
from holdfast.errors import ExitCode, failure

NOW, RESTART = "now", "restart"


def cancel(
    run: RunArgument = None,
    on: RunTargetOption = LOCAL,
    force: Annotated[
        bool, typer.Option("--force", help="Send SIGKILL without a grace period; works without a controller.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Stop a run.

    Its ranks get SIGTERM; ranks still alive after `recovery.stop_grace_s` get SIGKILL.
    """
    from holdfast import api

    found = api.find_run(run, on)
    by_controller = api.cancel(found, force=force)
    how = "is being killed" if force else "is stopping"
    if not by_controller:
        how = "was killed without its controller, which did not answer" if force else "was cancelled while it waited"
    print_result(output, {"run": found.run_id, "force": force, "by_controller": by_controller}, f"{found.run_id} {how}")


def checkpoint(
    run: RunArgument = None,
    on: RunTargetOption = LOCAL,
    timeout_s: WaitOption = 600.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Save a checkpoint at the next step, and wait for it.

    The ranks need a `holdfast.train` Session. The run continues.
    """
    from holdfast import api

    found = api.find_run(run, on)
    with console(stderr=True).status(f"waiting for a checkpoint of {found.run_id} (timeout {timeout_s:g} s)"):
        taken = api.checkpoint(found, timeout_s=timeout_s)
    document = {"run": found.run_id, "step": taken.step, "path": taken.path, "took_s": taken.took_s}
    print_result(output, document, f"step {taken.step} of {found.run_id} is saved: {taken.path}")


def update(
    run: RunArgument = None,
    on: RunTargetOption = LOCAL,
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
    found = api.find_run(run, on)
    with console(stderr=True).status(f"updating the code of {found.run_id} (timeout {timeout_s:g} s)"):
        updated = api.update(found, code=code, after_s=after_s, timeout_s=timeout_s)
    what = (
        f"code {short_digest(updated.digest)} in place of {short_digest(updated.previous_digest)}"
        if updated.digest
        else "the code in place"
    )
    step = updated.step.step if updated.step else None
    late = "" if after_s is None else f", or in {after_s:g} s at the latest"
    when_done = f" from its next restart{late}" if step is None else f": step {step} is done"
    print_result(
        output,
        {"run": found.run_id, "code": updated.digest, "former": updated.previous_digest, "step": step},
        f"{found.run_id} continues with {what}{when_done}",
    )


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
