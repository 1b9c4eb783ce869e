"""Owns how files are written that only their user may read, and that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def private(path: str, flags: int) -> int:
    """For `open(..., opener=private)`: a file that it makes is its user's alone."""
    return os.open(path, flags, 0o600)


def put(path: Path, content: bytes) -> None:
    """Have a private file hold this; who reads it meanwhile finds what was there before, whoever else puts it too."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)  # of an earlier process with this number
    try:
        with open(fresh, "xb", opener=private) as file:
            file.write(content)
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
