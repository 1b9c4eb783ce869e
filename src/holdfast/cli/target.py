"""The command `target`: where jobs can run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common_options import OutputOption
from holdfast.cli.output import Output, print_json, print_text


def target(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this target in full.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List the targets to run on, or show one."""
    from holdfast.fabric.catalog import NAMES
    from holdfast.job.targets import find_target, known_targets

    here = Path.cwd()
    if name is None:
        names = known_targets(here, os.environ)
        if output is Output.JSON:
            print_json(names)
        else:
            print_text("\n".join(names))
        return
    fields = find_target(name, start=here, environ=os.environ, fabrics=NAMES).model_dump(mode="json")
    if output is Output.JSON:
        print_json({"name": name, **fields})
    else:
        print_text("\n".join(f"{field}: {value}" for field, value in fields.items() if value is not None))
