"""Owns how a command line is cut up and explained, where Typer's own way is not ours."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class WithCommand(TyperCommand):
    """A verb that takes a command of the user's after `--`: those words are put into the context's `obj`.

    Left to Typer, they would fill the verb's own arguments.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        ctx.obj = tuple(args[cut + 1 :])
        return super().parse_args(ctx, args[:cut])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


class WithNumbers(TyperCommand):
    """A verb whose arguments may be negative numbers: `-9` is no option."""

    ignore_unknown_options = True


class Sections(TyperGroup):
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
