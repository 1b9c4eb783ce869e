"""Writes text or JSON to the terminal, with or without colours; no command writes on its own."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from msgspec import Struct
    from rich.console import Console, RenderableType


_CONTROL_CHARS = re.compile(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

PIPE_WIDTH = 240
"""Width in columns of a table written to a file or a pipe."""


class Output(StrEnum):
    """Values of `-o`."""

    TEXT = "text"
    JSON = "json"


def print_text(text: str) -> None:
    """Write text to standard output unmodified."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def print_json(*documents: object) -> None:
    """Write one JSON document per line; structs, events and findings are converted."""
    if documents:
        print_text("\n".join(map(to_json, documents)))


def print_result(output: Output, document: object, text: str) -> None:
    """Print a command's result in the requested format."""
    if output is Output.JSON:
        print_json(document)
    else:
        print_text(text)


def to_json(document: object) -> str:
    """One line of JSON; lone surrogates and terminal control characters are escaped."""
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


def with_properties(value: Struct, *names: str) -> dict[str, object]:
    """A struct as a JSON document, plus the named properties."""
    from msgspec.structs import asdict

    return asdict(value) | {name: getattr(value, name) for name in names}


def _as_data(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(cast("Mapping[object, object]", value))
    raise NotImplementedError(f"{type(value).__name__} is not data")


def console(*, stderr: bool = False) -> Console:
    """A Rich console without markup, automatic highlighting or wrapping outside tables."""
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


def working(what: str) -> AbstractContextManager[object]:
    """Show on standard error what a slow command is doing; nothing unless that is a terminal."""
    return console(stderr=True).status(what) if sys.stderr.isatty() else contextlib.nullcontext()


@contextlib.contextmanager
def working_after(seconds: float, what: str) -> Generator[None]:
    """Show it like `working`, but only from so many seconds on: what is quick neither flickers nor imports rich."""
    if not sys.stderr.isatty():
        yield
        return
    changing, shown, over = threading.Lock(), contextlib.ExitStack(), threading.Event()

    def show() -> None:
        with changing:
            if not over.is_set():
                shown.enter_context(working(what))

    timer = threading.Timer(seconds, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        over.set()
        with changing, shown:
            pass


def print_stderr(renderable: RenderableType) -> None:
    """Write to standard error; an OSError is ignored and the command continues."""
    with contextlib.suppress(OSError):
        console(stderr=True).print(renderable)


def print_rich(renderable: RenderableType) -> None:
    """Write a table or coloured text to standard output."""
    console().print(renderable)


def is_plain(stream: TextIO) -> bool:
    """Whether a stream shows no colours or live view: no terminal, a dumb one, or disabled by the user."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "dumb") == "dumb"
