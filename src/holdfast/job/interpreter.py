"""Recognises Python interpreters in commands; apart from the job's model, which an agent need not import."""

from __future__ import annotations

import re

_PYTHON = re.compile(r"(?:.*/)?python(?:\d+(?:\.\d+)?)?t?")


def is_python(word: str) -> bool:
    """Whether a command's first word is a Python interpreter."""
    return _PYTHON.fullmatch(word) is not None
