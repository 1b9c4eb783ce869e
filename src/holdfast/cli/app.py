"""Owns which verbs there are, and how errors end the process.

Verbs import what is heavy inside their functions, so that `holdfast --help` loads nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import typer
from typer.core import TyperCommand

from holdfast.cli import (
    attach,
    cancel,
    check,
    checkpoint,
    diagnose,
    drill,
    events,
    explain,
    fabric,
    init,
    logs,
    profile,
    ps,
    render,
    run,
    schema,
    status,
    target,
    update,
    validate,
    version,
)
from holdfast.cli.streams import output_failure
from holdfast.cli.typer_ext import CommandAfterDashes, NegativeNumberArguments, SectionedGroup
from holdfast.errors import ExitCode

COMMANDS = {
    "Describe": (init.init, validate.validate, render.render, schema.schema),
    "Run": (
        run.run,
        ps.ps,
        status.status,
        logs.logs,
        events.events,
        profile.profile,
        attach.attach,
        checkpoint.checkpoint,
        update.update,
        cancel.cancel,
    ),
    "Break it on purpose": (drill.drill,),
    "Verify": (check.check,),
    "Explain": (diagnose.diagnose, explain.explain),
    "Look up": (fabric.fabric, target.target),
}
COMMAND_CLASSES: dict[Callable[..., object], type[TyperCommand]] = {
    run.run: CommandAfterDashes,
    render.render: CommandAfterDashes,
    explain.explain: NegativeNumberArguments,
}

app = typer.Typer(
    cls=SectionedGroup,
    help="Run multi-node training that starts correctly, holds fast when things break, and says what happened.",
    epilog="Each verb takes --help. Where no run is named, the latest is meant; ids can be shortened.",
    add_completion=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _section, _verbs in COMMANDS.items():
    for _verb in _verbs:
        app.command(rich_help_panel=_section, cls=COMMAND_CLASSES.get(_verb))(_verb)
app.callback()(version.version)


def run_command(words: Sequence[str]) -> int:
    """Carry one command line out; the exit code."""
    try:
        code = app(words or ["--help"], prog_name="holdfast", standalone_mode=False)
        if (lost := output_failure()) is not None:
            raise lost
    except KeyboardInterrupt:
        return ExitCode.CANCELLED
    except SystemExit as ended:
        if not isinstance(ended.__context__, OSError):
            return ended.code if isinstance(ended.code, int) else ExitCode.OK  # the parser has completed a word
        from holdfast.cli.error_report import report_error

        # The parser ends so where a pipe was closed, any pipe, and says nothing of it.
        return report_error(ended.__context__, words)
    except Exception as error:
        from holdfast.cli.error_report import report_error

        return report_error(error, words)
    return code if isinstance(code, int) else ExitCode.OK
