"""Finds the files of targets by name. Light, because a command looks before it loads anything else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

LOCAL = "local"
"""The built-in target, and the default kind of every other."""

PROJECT_TARGETS = Path(".holdfast", "targets")
"""Folder of a project's target files."""

_NAME = re.compile(r"[A-Za-z0-9][-._A-Za-z0-9]{0,63}")

HOST_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.@:%-]{0,254}$"
"""A host as `ssh HOST` takes it."""


def project_file(name: str, folder: Path) -> Path | None:
    """Where a project in this folder has a target of this name; None if no target can have it."""
    return folder / PROJECT_TARGETS / f"{name}.yaml" if _NAME.fullmatch(name) else None


def target_file(name: str, start: Path, environ: Mapping[str, str]) -> Path | None:
    """The nearest target file of this name; None if there is none, or no target can have this name."""
    if not _NAME.fullmatch(name):
        return None
    files = (folder / f"{name}.yaml" for folder in target_folders(start, environ))
    return next((path for path in files if path.is_file()), None)


def known_targets(start: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of all targets available from `start`, sorted."""
    return tuple(sorted({LOCAL, *_names(start, environ)}))


def target_folders(start: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Folders to search for targets, nearest first."""
    projects = [folder for here in (start.absolute(), Path.cwd()) for folder in (here, *here.parents)]
    for folder in dict.fromkeys(projects):
        yield folder / PROJECT_TARGETS
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".config"
    yield Path(home) / "holdfast" / "targets"


def _names(start: Path, environ: Mapping[str, str]) -> Iterator[str]:
    for folder in target_folders(start, environ):
        for path in folder.glob("*.yaml"):
            if _NAME.fullmatch(path.stem):
                yield path.stem
