"""The verb `profile`: the places where jobs can run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import Output, say, say_json
from holdfast.cli.request import OutputOption


def profile(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this one, in full.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List the places to run, or show one."""
    from holdfast.fabric.catalog import NAMES
    from holdfast.job.profile import find_profile, known_profiles

    here = Path.cwd()
    if name is None:
        names = known_profiles(here, os.environ)
        if output is Output.JSON:
            say_json(names)
        else:
            say("\n".join(names))
        return
    fields = find_profile(name, start=here, environ=os.environ, fabrics=NAMES).model_dump(mode="json")
    if output is Output.JSON:
        say_json({"name": name, **fields})
    else:
        say("\n".join(f"{field}: {value}" for field, value in fields.items() if value is not None))
