"""The verb `drill`: break something of a run on purpose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import Output, say, say_json
from holdfast.cli.request import OutputOption
from holdfast.errors import ExitCode, HoldfastError, failure

if TYPE_CHECKING:
    from holdfast.events import DrillAction, DrillTarget


def drill(
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="kill, stop, lose, return, partition, skew, fill or exhaust.")
    ],
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET", help="rank:1, node:1, agent:0, memory:1, controller, run-folder or checkpoints."
        ),
    ],
    at_step: Annotated[int | None, typer.Option("--at-step", metavar="STEP", help="As soon as it is done.")] = None,
    for_s: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", min=0.0, help="It ends by itself; else it is for good.")
    ] = None,
    amount: Annotated[
        float | None, typer.Option("--by", metavar="AMOUNT", help="By how many seconds to skew a clock.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Id of a run; the latest if none.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Break a part of a run, to see it recover."""
    from holdfast import api

    what, (on, index) = parse_action(action), parse_target(target)
    found = api.find_run(run)
    api.drill(found, target=on, index=index, action=what, at_step=at_step, for_s=for_s, amount=amount)
    if output is Output.JSON:
        asked = {"action": what, "target": on, "index": index, "at_step": at_step, "for_s": for_s, "amount": amount}
        say_json({"run": found.run, **asked})
    else:
        when = "at once" if at_step is None else f"after step {at_step}"
        span = "" if for_s is None else f", for {for_s:g} s"
        much = "" if amount is None else f" by {amount:g}"
        say(f"{found.run}: {what} {':'.join(target)}{much} {when}{span}")


def parse_action(word: str) -> DrillAction:
    """Read `kill`; raises HoldfastError for what no drill does."""
    from holdfast.events import DrillAction

    if word in list(DrillAction):
        return DrillAction(word)
    raise _unknown("bad-action", f"`{word}` is nothing that a drill does", word, DrillAction)


def parse_target(words: list[str]) -> tuple[DrillTarget, int]:
    """Read `rank:1`, `rank 1` or `controller`; raises HoldfastError for anything else."""
    from holdfast.events import DrillTarget

    name, *numbers = ":".join(words).split(":")
    numbered = len(numbers) == 1 and numbers[0].isascii() and numbers[0].isdecimal()
    if name in list(DrillTarget) and (numbered if DrillTarget(name).numbered else not numbers):
        return DrillTarget(name), int(numbers[0]) if numbers else 0
    known = [f"{target}:1" if target.numbered else target.value for target in DrillTarget]
    raise _unknown("bad-target", f"`{' '.join(words)}` is nothing that can be broken", ":".join(words), known)


def _unknown(code: str, what: str, given: str, known: Iterable[str]) -> HoldfastError:
    import difflib

    names = [str(name) for name in known]
    near = difflib.get_close_matches(given, names, 1)
    remedy = f"Name {', '.join(names[:-1])} or {names[-1]}."
    return failure(
        code, what, exit_code=ExitCode.USAGE, remedy=f"Did you mean `{near[0]}`? {remedy}" if near else remedy
    )
