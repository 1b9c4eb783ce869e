"""Parses which commands are Python programs that can be prewarmed.

Pure. The option table serves prewarming: an option that hides PYTHONPATH or skips `site` would run the program instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from holdfast.job.interpreter import is_python

_FLAGS = frozenset("bBdOPqsuvx")
"""Options without an argument that do not change how a program is found."""
_TAKES_ARGUMENT = frozenset("WX")

_WHY_NOT = {
    "E": "-E has Python ignore PYTHONPATH",
    "I": "-I has Python ignore PYTHONPATH",
    "S": "-S has Python import no site",
    "i": "-i waits for somebody to type",
}


class PythonCommand(Struct, frozen=True, kw_only=True):
    """A parsed Python command: the interpreter with its options, and what it runs."""

    python: tuple[str, ...]
    kind: str
    """Kind of `text`: `script` (a path), `module` (a name) or `code` (source text)."""
    text: str


def parse_python_command(argv: Sequence[str]) -> PythonCommand | str:
    """The Python program that a command runs, or the reason why it cannot be prewarmed."""
    if not is_python(argv[0]):
        return f"{argv[0]} is no Python"
    index = 1
    while index < len(argv) and argv[index].startswith("-") and argv[index] not in ("-", "--"):
        letters = argv[index][1:]
        for at, letter in enumerate(letters):
            if letter in "mc":
                rest = letters[at + 1 :] or (argv[index + 1] if index + 1 < len(argv) else "")
                before = (f"-{letters[:at]}",) if at else ()
                kind = "module" if letter == "m" else "code"
                return PythonCommand(python=(*argv[:index], *before), kind=kind, text=rest)
            if letter in _TAKES_ARGUMENT:
                index += not letters[at + 1 :]
                break
            if letter not in _FLAGS:
                return _WHY_NOT.get(letter, f"{argv[index]} is an option that nothing is known of here")
        index += 1
    index += index < len(argv) and argv[index] == "--"
    if index >= len(argv) or argv[index] == "-":
        return "the program comes from standard input"
    return PythonCommand(python=tuple(argv[:index]), kind="script", text=argv[index])
