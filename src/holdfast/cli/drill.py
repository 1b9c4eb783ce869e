"""The verb `drill`: break something of a run on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common_options import OutputOption
from holdfast.cli.output import Output, print_json, print_text


def drill(
    action: Annotated[
        str,
        typer.Argument(
            metavar="ACTION",
            help="kill, stop, hang, raise, slow, remove, restore, partition, clock-skew, fill or exhaust; or a file of drills.",
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET",
            help="rank:1, collective:1, node:1, agent:0, memory:1, controller, quorum, run-dir or checkpoints.",
        ),
    ] = None,
    at_step: Annotated[int | None, typer.Option("--at-step", metavar="STEP", help="As soon as it is done.")] = None,
    for_s: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", min=0.0, help="It ends by itself; else it is for good.")
    ] = None,
    amount: Annotated[
        float | None,
        typer.Option("--amount", metavar="AMOUNT", help="Seconds to skew a clock by; how many times as slow."),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Id of a run; the latest if none.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Break a part of a run, to see it recover."""
    from holdfast import api
    from holdfast.job.fault_file import FAULT_FILE_SUFFIXES, parse_fault_action, parse_fault_target, read_fault_file

    if not target and action.endswith(FAULT_FILE_SUFFIXES):
        asked = read_fault_file(Path(action))
        found = api.find_run(run)
        api.inject_faults(found, asked)
        if output is Output.JSON:
            print_json({"run": found.run_id, "faults": len(asked)})
        else:
            print_text(f"{found.run_id}: {len(asked)} drills of {action} are asked for")
        return
    what, (on, index) = parse_fault_action(action), parse_fault_target(target or [])
    found = api.find_run(run)
    api.inject_fault(found, target=on, index=index, action=what, at_step=at_step, for_s=for_s, amount=amount)
    if output is Output.JSON:
        asked = {"action": what, "target": on, "index": index, "at_step": at_step, "for_s": for_s, "amount": amount}
        print_json({"run": found.run_id, **asked})
    else:
        when = "at once" if at_step is None else f"after step {at_step}"
        span = "" if for_s is None else f", for {for_s:g} s"
        much = "" if amount is None else f" by {amount:g}"
        print_text(f"{found.run_id}: {what} {':'.join(target or [])}{much} {when}{span}")
