"""Typer extensions: a command after `--`, negative numbers, help in sections."""

from __future__ import annotations

import shlex
import shutil
from typing import Any

from typer import TyperException
from typer.core import TyperCommand, TyperGroup

from holdfast.errors import ExitCode, failure

_JOB_FILES = (".yaml", ".yml", ".json")
"""A file with one of these suffixes is a job file, even if it is executable."""


class CommandAfterDashes(TyperCommand):
    """A command that takes the user's command after `--` and stores it in the context's `obj`.

    Typer alone would assign those words to its own arguments. A Python script needs no `--`: as with torchrun, the
    script and everything after it are the user's command.
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
        """The arguments from the first that is neither an option nor an option's value."""
        parser = self.make_parser(ctx)
        parser.allow_interspersed_args = False
        try:
            values, rest, _ = parser.parse_args(list(args))
        except TyperException:  # a wrong option; the command's own parser reports it
            return []
        return [values["file"], *rest] if values.get("file") else rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def _python() -> str:
    """The name of Python on this machine: some have only `python3`."""
    return "python" if shutil.which("python") or not shutil.which("python3") else "python3"


class NegativeNumberArguments(TyperCommand):
    """A command whose arguments may be negative numbers: `-9` is not an option."""

    ignore_unknown_options = True


class SectionedGroup(TyperGroup):
    """A group whose help lists commands in sections, in the order they were added.

    A command may have two words, such as `metrics serve`. If it requires an argument, as `target init` does, it is one
    only if a third word follows; otherwise `init` is an argument of `target`.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        two_words = " ".join(args[:2])
        found = self.commands.get(two_words)
        if found is not None and (len(args) > 2 or not any(each.required for each in found.params)):
            return two_words, found, args[2:]
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names for suggestions and shell completion, which are single words."""
        return [name for name in super().list_commands(ctx) if " " not in name]

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
