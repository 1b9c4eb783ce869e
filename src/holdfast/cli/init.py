"""The command `init`: write a commented job file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common_options import DEFAULT_FILE, OutputOption
from holdfast.cli.output import Output, print_json, print_text
from holdfast.errors import ExitCode, failure


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = DEFAULT_FILE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write a commented job file to start from.

    It never overwrites a file.
    """
    from holdfast.job.job_template import job_template

    text = job_template(file.absolute().parent.name)
    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        what = f"{file} is there already"
        remedy = "Give another name, or move it away."
        raise failure("file-exists", what, exit_code=ExitCode.USAGE, where=str(file), remedy=remedy) from None
    except (FileNotFoundError, NotADirectoryError):
        what = f"there is no folder {file.parent}"
        remedy = f"Make it: `mkdir -p {file.parent}`."
        raise failure("no-such-folder", what, exit_code=ExitCode.NOT_FOUND, where=str(file), remedy=remedy) from None
    if output is Output.JSON:
        print_json({"file": str(file)})
    else:
        print_text(f"wrote {file}; edit it, then `holdfast validate {file}` and `holdfast run {file}`")
