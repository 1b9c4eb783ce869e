"""The table of commands, and the mapping from errors to exit codes.

Commands import heavy modules inside their functions, so that `holdfast --help` starts fast.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer.core import TyperCommand

from holdfast import __version__
from holdfast.cli import (
    accept,
    check,
    describe,
    diagnose,
    drill,
    explain,
    image,
    logs,
    look_up,
    metrics,
    nodes,
    observe,
    plan,
    policy,
    profile,
    prune,
    ps,
    report,
    review,
    run,
    run_requests,
    status,
    web,
    write_target,
)
from holdfast.cli.streams import output_failure
from holdfast.cli.typer_ext import CommandAfterDashes, NegativeNumberArguments, SectionedGroup
from holdfast.errors import ExitCode

COMMANDS = {
    "Describe": (describe.init, describe.validate, describe.render, describe.schema, image.image_build),
    "Run": (
        run.run,
        ps.ps,
        status.status,
        logs.logs,
        logs.events,
        profile.profile,
        run.attach,
        run_requests.checkpoint,
        run_requests.update,
        run_requests.cancel,
        prune.prune,
    ),
    "Show": (web.web, report.report, metrics.metrics, metrics.metrics_serve, observe.observe_render),
    "Inject faults": (drill.drill,),
    "Verify": (check.check, nodes.nodes, policy.policy, image.image_check),
    "Predict": (plan.plan, review.review),
    "Prove": (accept.accept, accept.accept_ladder),
    "Explain": (diagnose.diagnose, explain.explain),
    "Look up": (look_up.fabric, look_up.target, write_target.target_init, write_target.target_fetch),
}
"""Commands by section of the help; the function `target_fetch` is the command `target fetch`."""
COMMAND_CLASSES: dict[Callable[..., object], type[TyperCommand]] = {
    run.run: CommandAfterDashes,
    describe.render: CommandAfterDashes,
    explain.explain: NegativeNumberArguments,
}


def _print_version(requested: bool) -> None:
    if requested:
        print(f"holdfast {__version__}, Python {platform.python_version()}{_torch()}")
        raise typer.Exit


def _torch() -> str:
    """From the package metadata: importing torch takes seconds."""
    from importlib import metadata

    try:
        return f", torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return ""


def version(
    requested: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions installed here."),
    ] = False,
) -> None:
    """Options before a command."""


def command_line(*names: str) -> typer.Typer:
    """The command line with these commands, or with all of them: Typer takes about a millisecond to build each."""
    made = typer.Typer(
        cls=SectionedGroup,
        help="Launch multi-node PyTorch training, recover from failures, and diagnose them.",
        epilog="Every command has --help. RUN defaults to the latest run; a unique prefix of its id is enough.",
        add_completion=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for section, verbs in COMMANDS.items():
        for verb in verbs:
            name = verb.__name__.replace("_", " ")
            if name in names or not names:
                made.command(name, rich_help_panel=section, cls=COMMAND_CLASSES.get(verb))(verb)
    made.callback()(version)
    return made


app = command_line()
NAMES = frozenset(str(command.name) for command in app.registered_commands)


def run_command(words: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    named = NAMES.intersection((" ".join(words[:1]), " ".join(words[:2])))
    try:
        code = command_line(*named)(words or ["--help"], prog_name="holdfast", standalone_mode=False)
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
