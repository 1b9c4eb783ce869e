"""The command `explain`: the meaning of a finding, exit code, signal or error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import OutputOption
from holdfast.cli.output import Output, print_json, print_rich, print_text
from holdfast.errors import ExitCode, failure

if TYPE_CHECKING:
    from rich.text import Text

    from holdfast.diagnose.knowledge.explanation import Explanation

_LABEL_WIDTH = 12


def _complete_code(incomplete: str) -> list[str]:
    """Shell completion for CODE."""
    from holdfast.diagnose.knowledge.index import GROUPS

    codes = (row.code for rows in GROUPS.values() for row in rows)
    return sorted({code for code in codes if code.startswith(incomplete) and " " not in code})


def explain(
    code: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CODE",
            help="For example rank-hung, XID-79, SIGBUS, -9, ncclSystemError.",
            autocompletion=_complete_code,
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Explain a code: its cause, how to confirm it, what to do.

    Covers findings, exit codes, signals, NCCL, InfiniBand and CUDA errors, Xid and SXid. Without CODE it lists all
    codes.
    """
    from holdfast.diagnose.knowledge.index import GROUPS

    if code:
        from rich.text import Text

        rows = _found(" ".join(code))
        if output is Output.JSON:
            print_json(*rows)
        else:
            print_rich(Text("\n\n").join(map(_block, rows)))
    elif output is Output.JSON:
        print_json(*(row for rows in GROUPS.values() for row in rows))
    else:
        for heading, rows in GROUPS.items():
            print_text(f"{heading}\n  {'  '.join(row.code for row in rows)}\n")


def _found(words: str) -> list[Explanation]:
    from holdfast.diagnose.knowledge.index import find, suggest

    if rows := find(words):
        return rows
    near = suggest(words)
    remedy = f"Did you mean {', '.join(near)}?" if near else "`holdfast explain` lists all that is known."
    raise failure("unknown-code", f"there is no explanation of `{words}`", exit_code=ExitCode.NOT_FOUND, remedy=remedy)


def _block(row: Explanation) -> Text:
    from rich.text import Text

    parts = (("cause", row.cause), ("confirm", row.confirm), ("what to do", row.remedy), ("source", row.source))
    head = Text.assemble((row.code, "bold"), f"  {row.title}" if row.title else "")
    return Text("\n").join(
        [head, *(Text.assemble((f"  {label:<{_LABEL_WIDTH}}", "dim"), text) for label, text in parts)]
    )
