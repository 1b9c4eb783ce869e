"""Owns how a command line is cut up and explained, where Typer's own way is not ours."""

from __future__ import annotations

import shlex
import shutil
from typing import Any

from typer import TyperException
from typer.core import TyperCommand, TyperGroup

from holdfast.errors import ExitCode, failure

_JOB_FILES = (".yaml", ".yml", ".json")
"""A job file is one whether or not its file system marks every file as executable."""


class CommandAfterDashes(TyperCommand):
    """A verb that takes a command of the user's after `--`: those words are put into the context's `obj`.

    Left to Typer, they would fill the verb's own arguments. A Python script needs no `--`: it and all that follows it
    are the command, as with torchrun.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            ctx.obj = tuple(args[cut + 1 :])
            return super().parse_args(ctx, args[:cut])
        rest = self._from_first_argument(ctx, args)
        own = args[: len(args) - len(rest)]
        if rest and rest[0].endswith(".py"):
            ctx.obj = (_python(), *rest)
            return super().parse_args(ctx, own)
        if rest and not rest[0].endswith(_JOB_FILES) and shutil.which(rest[0]):
            raise failure(
                "command-without-dashes",
                f"`{rest[0]}` is a program, and a command goes after `--`",
                exit_code=ExitCode.USAGE,
                remedy=f"Run `{shlex.join([*ctx.command_path.split(), *own, '--', *rest])}`.",
            )
        ctx.obj = ()
        return super().parse_args(ctx, args)

    def _from_first_argument(self, ctx: Any, args: list[str]) -> list[str]:
        """The words from the first one on that is neither an option nor an option's value."""
        parser = self.make_parser(ctx)
        parser.allow_interspersed_args = False
        try:
            values, rest, _ = parser.parse_args(list(args))
        except TyperException:  # a wrong option; the verb's own parsing says so
            return []
        return [values["file"], *rest] if values.get("file") else rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def _python() -> str:
    """The name under which this machine has Python: some have only `python3`."""
    return "python" if shutil.which("python") or not shutil.which("python3") else "python3"


class NegativeNumberArguments(TyperCommand):
    """A verb whose arguments may be negative numbers: `-9` is no option."""

    ignore_unknown_options = True


class SectionedGroup(TyperGroup):
    """A group whose help lists its verbs in sections, in the order they were added."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        longest = max(map(len, self.commands))
        for name, verb in self.commands.items():
            limit = formatter.width - longest - 6
            row = (name.ljust(longest), verb.get_short_help_str(limit))
            sections.setdefault(str(getattr(verb, "rich_help_panel", "")), []).append(row)
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)
