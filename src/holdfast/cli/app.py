"""The table of commands, and the mapping from errors to exit codes.

Commands import heavy modules inside their functions, so that `holdfast --help` starts fast.
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
    "Inject faults": (drill.drill,),
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
    help="Launch multi-node PyTorch training, recover from failures, and diagnose them.",
    epilog="Every command has --help. RUN defaults to the latest run; a unique prefix of its id is enough.",
    add_completion=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _section, _verbs in COMMANDS.items():
    for _verb in _verbs:
        app.command(rich_help_panel=_section, cls=COMMAND_CLASSES.get(_verb))(_verb)
app.callback()(version.version)


def run_command(words: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        code = app(words or ["--help"], prog_name="holdfast", standalone_mode=False)
        if (lost := output_failure()) is not None:
            raise lost
    except KeyboardInterrupt:
        return ExitCode.CANCELLED
    except SystemExit as ended:
        if not isinstance(ended.__context__, OSError):
            return ended.code if isinstance(ended.code, int) else ExitCode.OK  # shell completion
        from holdfast.cli.error_report import report_error

        # Typer exits like this after a broken pipe, whichever pipe it was, without a message.
        return report_error(ended.__context__, words)
    except Exception as error:
        from holdfast.cli.error_report import report_error

        return report_error(error, words)
    return code if isinstance(code, int) else ExitCode.OK
