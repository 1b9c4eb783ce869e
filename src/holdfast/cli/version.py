"""`holdfast --version`: what is installed here, in one line."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated

import typer

from holdfast import __version__


def _tell(asked: bool) -> None:
    if asked:
        print(f"holdfast {__version__}, Python {platform.python_version()}{_torch()}")
        raise typer.Exit


def _torch() -> str:
    """Looked up: its import takes seconds."""
    try:
        return f", torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return ""


def version(
    asked: Annotated[
        bool, typer.Option("--version", callback=_tell, is_eager=True, help="Print the versions installed here.")
    ] = False,
) -> None:
    """What may be said before a verb."""
