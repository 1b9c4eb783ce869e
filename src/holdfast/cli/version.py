"""`holdfast --version`: installed versions in one line."""

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
    """From the package metadata: importing torch takes seconds."""
    try:
        return f", torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return ""


def version(
    asked: Annotated[
        bool, typer.Option("--version", callback=_tell, is_eager=True, help="Print the versions installed here.")
    ] = False,
) -> None:
    """Options before a command."""
