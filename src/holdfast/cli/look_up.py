"""The commands that look up what a job can name: fabric and target."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import asdict, fields

from holdfast.cli.common_options import OutputOption, complete_target
from holdfast.cli.output import Output, print_json, print_result, print_rich, print_text
from holdfast.errors import ExitCode, HoldfastError, failure

if TYPE_CHECKING:
    from holdfast.fabric.fabric import Fabric


def fabric(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this fabric in full.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List the fabrics a job can name, or show one."""
    from rich.table import Table

    from holdfast.fabric.catalog import CATALOG

    if name is not None and name not in CATALOG:
        raise unknown_fabric(name)
    rows = [row for row in CATALOG.values() if name in (None, row.name)]
    if output is Output.JSON:
        print_json([_data(row) for row in rows])
        return
    if name is not None:
        for row in rows:
            for field, value in _data(row).items():
                if field == "variables":
                    for each in row.variables:
                        print_text(f"{each.name}={shlex.quote(each.value)}\n{'':<20} {each.reason}")
                else:
                    print_text(f"{field:<20} {value}")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("name", "what", "sets"):
        table.add_column(heading)
    for row in rows:
        first, *more = row.variables
        table.add_row(row.name, row.description, f"{first.name}={first.value}{f', {len(more)} more' * bool(more)}")
    print_rich(table)


def unknown_fabric(name: str) -> HoldfastError:
    """The error for a fabric that the catalogue does not have."""
    from holdfast.fabric.catalog import CATALOG

    remedy = f"Use one of {', '.join(CATALOG)}."
    return failure("unknown-fabric", f"there is no fabric `{name}`", exit_code=ExitCode.NOT_FOUND, remedy=remedy)


def _data(row: Fabric) -> dict[str, object]:
    data: dict[str, object] = {field.name: getattr(row, field.name) for field in fields(row)}
    data["variables"] = [each._asdict() for each in row.variables]
    data["pod"] = {name: value for name, value in asdict(row.pod).items() if value}
    return data


def target(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show this target in full.", autocompletion=complete_target),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List the targets to run on, or show one.

    `target init` writes a first one, and `target fetch` stores the template of one.
    """
    from holdfast.fabric.catalog import NAMES
    from holdfast.job.target_files import known_targets, target_file
    from holdfast.job.targets import find_target
    from holdfast.launch.target import TARGET_KINDS

    here = Path.cwd()
    if name is None:
        names = known_targets(here, os.environ)
        print_result(output, names, "\n".join(names))
        return
    if name in ("init", "fetch") and target_file(name, here, os.environ) is None:
        remedy = f"See `holdfast target {name} --help`."
        raise failure(
            "bad-usage", f"`holdfast target {name}` needs an argument", exit_code=ExitCode.USAGE, remedy=remedy
        )
    spec = find_target(name, start=here, environ=os.environ, fabrics=NAMES, kinds=TARGET_KINDS)
    found = spec.model_dump(mode="json")
    text = "\n".join(f"{field}: {value}" for field, value in found.items() if value is not None)
    print_result(output, {"name": name, **found}, text)
