"""Owns how anything reaches the terminal: text or JSON, with or without colours. No verb writes by itself."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console, RenderableType


_CONTROL_CHARS = re.compile(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

PIPE_WIDTH = 240
"""Columns of a table that goes to a file or a pipe."""


class Output(StrEnum):
    """What `-o` takes."""

    TEXT = "text"
    JSON = "json"


def print_text(text: str) -> None:
    """Write text to standard output as it is."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def print_json(*documents: object) -> None:
    """Write each JSON document on a line of its own; dataclasses, events and findings are data."""
    if documents:
        print_text("\n".join(map(to_json, documents)))


def to_json(document: object) -> str:
    """One line of JSON; what no UTF-8 can hold, and what a terminal may obey, is written as an escape."""
    import msgspec

    try:
        text = msgspec.json.encode(document, enc_hook=_as_data).decode()
    except UnicodeEncodeError:
        text = msgspec.json.encode(_printable(msgspec.to_builtins(document, enc_hook=_as_data))).decode()
    return _CONTROL_CHARS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _printable(value: object) -> object:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            items = cast("dict[object, object]", value).items()
            return {_printable(key): _printable(each) for key, each in items}
        case list() | tuple():
            return [_printable(each) for each in cast("Sequence[object]", value)]
        case _:
            return value


def with_properties(value: DataclassInstance, *names: str) -> dict[str, object]:
    """A dataclass as a JSON document, with those of its properties that text shows as well."""
    plain = {field.name: getattr(value, field.name) for field in fields(value)}
    return plain | {name: getattr(value, name) for name in names}


def _as_data(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(cast("Mapping[object, object]", value))
    raise NotImplementedError(f"{type(value).__name__} is not data")


def console(*, stderr: bool = False) -> Console:
    """A Rich console that takes text as it is: no markup, no guessed colours, no wrapped lines outside tables."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
        width=None if stream.isatty() else PIPE_WIDTH,
        color_system=None if is_plain(stream) else "auto",
    )


def print_stderr(renderable: RenderableType) -> None:
    """Write to standard error, beside what a verb does; where that fails the verb goes on without."""
    with contextlib.suppress(OSError):
        console(stderr=True).print(renderable)


def print_rich(renderable: RenderableType) -> None:
    """Write a table or coloured text to standard output."""
    console().print(renderable)


def is_plain(stream: TextIO) -> bool:
    """Whether a stream is no place for colours and a live view: not a terminal, a dumb one, or told to be plain."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "dumb") == "dumb"
