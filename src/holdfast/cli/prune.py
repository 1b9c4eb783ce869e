"""The command `prune`: delete what runs that are over left behind."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import LOCAL, OutputOption, RunTargetOption
from holdfast.cli.output import Output, print_json, print_text
from holdfast.errors import ExitCode, failure

if TYPE_CHECKING:
    from holdfast.prune_runs import Leftover

_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_AGE = re.compile(r"(\d{1,6})([mhd])")


def prune(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Full ids of runs; deletes these at any age, with their checkpoints."),
    ] = None,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Only runs that ended so long ago: 30d, 12h or 0m.")
    ] = "30d",
    on: RunTargetOption = LOCAL,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Delete the folders of runs that are over.

    With --on, deletes the runs' objects on the target instead. Folders with checkpoints, of runs that are alive, and
    with an unreadable log stay, and are listed with the reason. Volumes on a cluster stay.
    """
    from holdfast import api

    found = api.prune(on, older_than_s=parse_age(older_than), named=runs or (), dry_run=dry_run)
    if output is Output.JSON:
        print_json({"target": on, "dry_run": dry_run, "runs": found})
        return
    for each in found:
        print_text(_line(each, dry_run=dry_run))
    if not found:
        print_text("nothing to delete")
    elif on != LOCAL:
        print_text("Volume claims, and folders on this machine, stay.")


def parse_age(text: str) -> float:
    """Parse `30d`, `12h` or `5m` to seconds."""
    found = _AGE.fullmatch(text)
    if found is None:
        what = f"`--older-than {text}` is no age"
        raise failure("bad-age", what, exit_code=ExitCode.USAGE, remedy="Write 30d, 12h or 0m.")
    return int(found[1]) * _SECONDS[found[2]]


def _line(each: Leftover, *, dry_run: bool) -> str:
    size = "" if each.bytes is None else f", {each.bytes / 2**20:.1f} MiB"
    if each.kept:
        return f"{each.run} stays{size}: {each.kept}"
    return f"{each.run} {'would be deleted' if dry_run else 'deleted'}{size}: {each.where}"
