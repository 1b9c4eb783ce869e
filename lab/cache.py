"""A cache of folders, each named by a hash of its inputs and created atomically."""

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
    """The cache's path: $XDG_CACHE_HOME/holdfast/lab."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "holdfast" / "lab"


def cached_dir(name: str, ingredients: Iterable[bytes], make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills from these inputs; of two concurrent callers, one makes it."""
    path = _cache_path(name, ingredients)
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f"{name}.lock")):
        if path.is_dir():
            return path
        fresh = path.with_name(f"{name}.part")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        try:
            make(fresh)
            fresh.rename(path)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    return path


def is_cached(name: str, ingredients: Iterable[bytes]) -> bool:
    """Whether the cache has the folder."""
    return _cache_path(name, ingredients).is_dir()


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold a lock against other processes; it is released when its holder ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache_path(name: str, ingredients: Iterable[bytes]) -> Path:
    digest = hashlib.sha256()
    for ingredient in ingredients:
        digest.update(hashlib.sha256(ingredient).digest())
    return home() / f"{name}-{digest.hexdigest()[:_KEY_CHARACTERS]}"
