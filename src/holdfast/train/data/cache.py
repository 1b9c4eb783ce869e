"""Owns the cache of tokens on a node's disk: made once by whichever rank comes first, then mapped into memory by all.

A file of tokens is complete from the moment it has its name; one that was cut short since is made anew.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from holdfast.errors import ExitCode, failure
from holdfast.findings import Fault
from holdfast.host.files import open_lock
from holdfast.train.data.tokens import Tokens

FORMAT = 1


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file of tokens without reading it."""

    count: int
    digest: str
    """Of all its tokens."""


def place(environment: Mapping[str, str] = os.environ) -> Path:
    """Where tokens are kept unless the script says so: as other caches of the user."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast" / "text"


def fetch(folder: Path, key: str, dtype: type[np.generic], parts: Iterable[Tokens]) -> tuple[Tokens, str]:
    """The tokens kept under a key, and their digest; `parts` is asked for them where nothing is kept."""
    name = blake2b(f"{FORMAT} {np.dtype(dtype).name} {key}".encode(), digest_size=16).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_lock(folder / f"{name}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = _kept(folder / name, dtype) or _write(folder / name, parts)
    except OSError as error:
        raise failure(
            "data-cache-unwritable",
            "the tokens of the text cannot be kept",
            exit_code=ExitCode.STORAGE,
            where=str(folder),
            evidence=(str(error),),
            remedy="give a folder that can be written and has room: Text(..., cache=...)",
            fault=Fault.CLUSTER,
        ) from error
    if kept.count == 0:
        return np.array([], dtype=dtype), kept.digest
    return np.memmap(folder / f"{name}.tokens", dtype=dtype, mode="r"), kept.digest


def _kept(path: Path, dtype: type[np.generic]) -> Kept | None:
    try:
        kept = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Kept)
        whole = path.with_suffix(".tokens").stat().st_size == kept.count * np.dtype(dtype).itemsize
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return kept if whole else None


def _write(path: Path, parts: Iterable[Tokens]) -> Kept:
    digest, count = blake2b(digest_size=16), 0
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for part in parts:
            raw: Any = np.ascontiguousarray(part).data
            file.write(raw)
            digest.update(raw)
            count += len(part)
    kept = Kept(count=count, digest=digest.hexdigest())
    partial.rename(path.with_suffix(".tokens"))
    told = path.with_suffix(".json.partial")
    told.write_bytes(msgspec.json.encode(kept))
    told.rename(path.with_suffix(".json"))
    return kept
