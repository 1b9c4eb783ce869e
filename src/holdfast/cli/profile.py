"""The verb `profile`: where a step's time goes."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common_options import OutputOption, RunArgument
from holdfast.cli.output import Output, console, print_json, print_text


def profile(
    run: RunArgument = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Longest to wait for the profile.")
    ] = 600.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Profile a few steps of a run: where does the time go?

    Its ranks need a `holdfast.train` Session. The run continues.
    """
    from holdfast import api
    from holdfast.metrics.metric_catalog import ON_REQUEST
    from holdfast.metrics.metric_text import BREAKDOWN, format_metrics

    found = api.find_run(run)
    with console(stderr=True).status(f"profiling the next steps of {found.run_id}, for at most {timeout_s:g} s"):
        step = api.profile_steps(found, timeout_s=timeout_s)
    if output is Output.JSON:
        parts = {name: spent_s for name, spent_s in step.metrics.items() if name in ON_REQUEST}
        print_json({"run": found.run_id, "step": step.step, "metrics": parts})
    else:
        print_text(f"step {step.step} of {found.run_id}: {', '.join(format_metrics(step.metrics, BREAKDOWN))}")
