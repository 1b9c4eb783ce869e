"""Reads the source of the Python script that a command runs."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from holdfast.agent.python_command import parse_python_command
from holdfast.host.files import open_regular

MAX_SCRIPT_BYTES = 1 << 20
"""Hand-written scripts are shorter."""


def parse_script(argv: Sequence[str], cwd: Path, *required: bytes) -> ast.Module | None:
    """Parse a script that contains all `required` words; None for others, and if it cannot be read."""
    found = parse_python_command(argv)
    if isinstance(found, str) or found.kind == "module":
        return None
    try:
        source = found.text.encode() if found.kind == "code" else _read(cwd / found.text)
        return ast.parse(source) if all(word in source for word in required) else None
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        source = file.read(MAX_SCRIPT_BYTES + 1)
    if len(source) > MAX_SCRIPT_BYTES:
        raise ValueError(f"{path} is longer than {MAX_SCRIPT_BYTES} bytes")
    return source
