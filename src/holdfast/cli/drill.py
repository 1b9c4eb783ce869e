"""The verb `drill`: break something of a run on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import Output, say, say_json
from holdfast.cli.request import OutputOption
from holdfast.errors import ExitCode, failure
from holdfast.events.operator import DrillAction

if TYPE_CHECKING:
    from holdfast.events.operator import DrillTarget


def drill(
    action: Annotated[DrillAction, typer.Argument(help="SIGKILL, or SIGSTOP: there, but without an answer.")],
    target: Annotated[
        list[str], typer.Argument(metavar="TARGET", help="rank:1, node:1, agent:0 or controller; `rank 1` will do.")
    ],
    at_step: Annotated[int | None, typer.Option("--at-step", metavar="STEP", help="As soon as it is done.")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Id of a run; the latest if none.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Kill or stop a part of a run, to see it recover."""
    from holdfast import api

    what, index = parse_target(target)
    found = api.find_run(run)
    api.drill(found, target=what, index=index, action=action, at_step=at_step)
    if output is Output.JSON:
        say_json({"run": found.run, "action": action, "target": what, "index": index, "at_step": at_step})
    else:
        when = "at once" if at_step is None else f"after step {at_step}"
        say(f"{found.run}: {action} {':'.join(target)} {when}")


def parse_target(words: list[str]) -> tuple[DrillTarget, int]:
    """Read `rank:1`, `rank 1` or `controller`; raises HoldfastError for anything else."""
    from holdfast.events.operator import DrillTarget

    name, *numbers = ":".join(words).split(":")
    if name == DrillTarget.CONTROLLER and not numbers:
        return DrillTarget.CONTROLLER, 0
    known = name in (DrillTarget.RANK, DrillTarget.NODE, DrillTarget.AGENT)
    if not known or len(numbers) != 1 or not (numbers[0].isascii() and numbers[0].isdecimal()):
        what = f"`{' '.join(words)}` is nothing that can be broken"
        remedy = "Name rank:1, node:1, agent:0 or controller."
        raise failure("bad-target", what, exit_code=ExitCode.USAGE, remedy=remedy)
    return DrillTarget(name), int(numbers[0])
