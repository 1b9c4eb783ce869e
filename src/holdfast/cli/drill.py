"""The command `drill`: inject a fault into a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common_options import LOCAL, OutputOption, RunTargetOption
from holdfast.cli.output import Output, print_result


def drill(
    action: Annotated[
        str,
        typer.Argument(
            metavar="ACTION",
            help="kill, stop, hang, raise, slow, data-stall, leak, nan, spike, bitflip, fail, ecc-error, throttle, "
            "link-errors, remove, restore, partition, clock-skew, fill, oom, or a fault file.",
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET",
            help="rank:1, collective:1, loss:1, gradient:1, gpu:1, nvlink:1, nic:1 (of rank 1), node:1, agent:0, "
            "controller, lighthouse, run-dir or checkpoints.",
        ),
    ] = None,
    at_step: Annotated[
        int | None, typer.Option("--at-step", metavar="STEP", help="Inject after this step (default: immediately).")
    ] = None,
    for_s: Annotated[
        float | None,
        typer.Option("--for", metavar="SECONDS", min=0.0, help="Undo the fault after SECONDS (default: never)."),
    ] = None,
    amount: Annotated[
        float | None,
        typer.Option("--amount", metavar="AMOUNT", help="Seconds of clock skew, or the slowdown factor."),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Id of a run (default: the latest).")] = None,
    on: RunTargetOption = LOCAL,
    output: OutputOption = Output.TEXT,
) -> None:
    """Inject a fault into a run, to see it recover."""
    from holdfast import api
    from holdfast.job.fault_file import FAULT_FILE_SUFFIXES, parse_fault_action, parse_fault_target, read_fault_file

    if not target and action.endswith(FAULT_FILE_SUFFIXES):
        faults = read_fault_file(Path(action))
        found = api.find_run(run, on)
        api.inject_faults(found, faults)
        document = {"run": found.run_id, "faults": len(faults)}
        print_result(output, document, f"{found.run_id}: {len(faults)} faults of {action} requested")
        return
    what, (victim, index) = parse_fault_action(action), parse_fault_target(target or [])
    found = api.find_run(run, on)
    api.inject_fault(found, target=victim, index=index, action=what, at_step=at_step, for_s=for_s, amount=amount)
    request = {"action": what, "target": victim, "index": index, "at_step": at_step, "for_s": for_s, "amount": amount}
    when = "immediately" if at_step is None else f"after step {at_step}"
    span = "" if for_s is None else f", for {for_s:g} s"
    much = "" if amount is None else f" by {amount:g}"
    text = f"{found.run_id}: {what} {':'.join(target or [])}{much} {when}{span}"
    print_result(output, {"run": found.run_id, **request}, text)
