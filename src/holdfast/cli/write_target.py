"""The commands that write files of targets: target fetch."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common_options import OutputOption
from holdfast.cli.output import Output, print_result


def target_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Target whose file has `extends`.")],
    output: OutputOption = Output.TEXT,
) -> None:
    """Store the template that a target extends.

    The copy is next to the target's file, to be committed: no other command but `check` looks at the published one.
    """
    from holdfast import api

    fetched = api.fetch_template(name)
    done = "is up to date with" if fetched.was_stored else "stored from"
    text = f"{fetched.file} {done} {fetched.source}\nversions: {', '.join(fetched.versions)}"
    document = {
        "target": name,
        "source": fetched.source,
        "file": str(fetched.file),
        "was_stored": fetched.was_stored,
        "versions": fetched.versions,
    }
    print_result(output, document, text)
