"""Owns what is made once and kept: folders named by a hash of all that went into them, whole or not there at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

_KEY_CHARACTERS = 16


def home() -> Path:
    """Where what was made lies: $XDG_CACHE_HOME/holdfast/lab."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "holdfast" / "lab"


def cached_dir(name: str, ingredients: Iterable[bytes], make: Callable[[Path], None]) -> Path:
    """The folder that `make` filled from these ingredients, now or earlier; of two that ask at once, one makes it."""
    place = _place(name, ingredients)
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.with_name(f"{name}.lock")):
        if place.is_dir():
            return place
        fresh = place.with_name(f"{name}.part")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        try:
            make(fresh)
            fresh.rename(place)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    return place


def is_cached(name: str, ingredients: Iterable[bytes]) -> bool:
    """Whether it is there already."""
    return _place(name, ingredients).is_dir()


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Keep other processes out for a while; the lock goes with its holder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _place(name: str, ingredients: Iterable[bytes]) -> Path:
    digest = hashlib.sha256()
    for ingredient in ingredients:
        digest.update(hashlib.sha256(ingredient).digest())
    return home() / f"{name}-{digest.hexdigest()[:_KEY_CHARACTERS]}"
