"""The verb `drill`: break something of a run on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import Output, say, say_json
from holdfast.cli.request import OutputOption


def drill(
    action: Annotated[
        str,
        typer.Argument(
            metavar="ACTION",
            help="kill, stop, hang, raise, slow, lose, return, partition, skew, fill or exhaust; or a file of drills.",
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET",
            help="rank:1, collective:1, node:1, agent:0, memory:1, controller, quorum, run-folder or checkpoints.",
        ),
    ] = None,
    at_step: Annotated[int | None, typer.Option("--at-step", metavar="STEP", help="As soon as it is done.")] = None,
    for_s: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", min=0.0, help="It ends by itself; else it is for good.")
    ] = None,
    amount: Annotated[
        float | None, typer.Option("--by", metavar="AMOUNT", help="Seconds to skew a clock by; how many times as slow.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Id of a run; the latest if none.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Break a part of a run, to see it recover."""
    from holdfast import api
    from holdfast.job.drillbook import SUFFIXES, action_of, read_drills, target_of

    if not target and action.endswith(SUFFIXES):
        asked = read_drills(Path(action))
        found = api.find_run(run)
        api.drills(found, asked)
        if output is Output.JSON:
            say_json({"run": found.run, "drills": len(asked)})
        else:
            say(f"{found.run}: {len(asked)} drills of {action} are asked for")
        return
    what, (on, index) = action_of(action), target_of(target or [])
    found = api.find_run(run)
    api.drill(found, target=on, index=index, action=what, at_step=at_step, for_s=for_s, amount=amount)
    if output is Output.JSON:
        asked = {"action": what, "target": on, "index": index, "at_step": at_step, "for_s": for_s, "amount": amount}
        say_json({"run": found.run, **asked})
    else:
        when = "at once" if at_step is None else f"after step {at_step}"
        span = "" if for_s is None else f", for {for_s:g} s"
        much = "" if amount is None else f" by {amount:g}"
        say(f"{found.run}: {what} {':'.join(target or [])}{much} {when}{span}")
