"""Owns the seal of a checkpoint: the file that says what its folder must hold, and the check that it does.

Refuses to own what the files mean (checkpoint.py does).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from holdfast.errors import ExitCode, failure
from holdfast.train.configured import Configured
from holdfast.train.environment import ELSEWHERE

FORMAT = 1
"""Of the folder as a whole; raised when an older holdfast could not read it."""
NAME = "seal.json"
READ_BYTES = 1 << 18
"""Little enough to stay in a core's own cache between being read and being summed."""


class FileSum(msgspec.Struct, frozen=True):
    """What a file must be found to be."""

    size: int
    crc32: int
    """Finds torn and flipped bytes at 4 GB/s here, where SHA-256 does 1; it is no defence against people."""


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """Written last: its presence under the final name says that the checkpoint is complete."""

    format: int = FORMAT
    step: int
    world_size: int
    samples: int | None = None
    """Samples that the steps so far have taken; none where the training does not tell."""
    node_s: float = 0.0
    """Seconds of training so far, of all nodes together."""
    configured: Configured | None = None
    """What the program had set; none where it was not noted."""
    files: dict[str, FileSum]


class _Version(msgspec.Struct, frozen=True):
    """What every version of a seal says, now and later."""

    format: int


def sums(files: Iterable[Path]) -> dict[str, FileSum]:
    """See these files to disk; returns what they are, by name. The disk works while the sums are made."""
    files = list(files)
    with ThreadPoolExecutor(max(1, 2 * len(files))) as pool:
        synced = [pool.submit(_sync, file) for file in files]
        summed = [pool.submit(_sum, file) for file in files]
    for each in synced:
        each.result()
    return {file.name: each.result() for file, each in zip(files, summed, strict=True)}


def write(folder: Path, seal: Seal) -> None:
    """Seal a folder whose files are on disk already; the seal, too, is on disk when this returns."""
    with (folder / NAME).open("wb") as file:
        file.write(encoded(seal))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read(folder: Path) -> Seal | str:
    """A folder's seal, of whatever format, or the damage to it."""
    try:
        return decoded((folder / NAME).read_bytes())
    except OSError as error:
        return f"{NAME}: {error}"


def encoded(seal: Seal) -> bytes:
    """A seal as its file holds it."""
    return msgspec.json.encode(seal)


def decoded(content: bytes) -> Seal | str:
    """What a seal's file holds, or the damage to it."""
    try:
        return msgspec.json.decode(content, type=Seal)
    except msgspec.DecodeError as error:
        return _of_later_version(content) or f"{NAME}: {error}"


def refuse_later(sealed: Seal, where: str) -> None:
    """Raise where only a later holdfast can read it: to go on from an older one would undo steps unasked."""
    if sealed.format > FORMAT:
        raise failure(
            "checkpoint-from-later-version",
            f"the newest checkpoint has format {sealed.format}; this holdfast reads up to {FORMAT}",
            exit_code=ExitCode.IMPOSSIBLE,
            where=where,
            remedy=f"upgrade holdfast, or {ELSEWHERE}",
        )


def _of_later_version(content: bytes) -> Seal | None:
    """One that says that it is, whatever else it says: it may say all of it otherwise."""
    try:
        version = msgspec.json.decode(content, type=_Version)
    except msgspec.DecodeError:
        return None
    return Seal(format=version.format, step=0, world_size=0, files={}) if version.format > FORMAT else None


def damage(file: Path, sealed: FileSum) -> str | None:
    """How a file differs from what it was sealed as; None where it does not."""
    try:
        size = file.stat().st_size
        found = _sum(file) if size == sealed.size else None
    except FileNotFoundError:
        return f"{file.name}: sealed as {_words(sealed)}, and missing"
    except OSError as error:
        return f"{file.name}: {error}"
    if found == sealed:
        return None
    return f"{file.name}: sealed as {_words(sealed)}, found to be {_words(found) if found else f'{size} bytes'}"


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _words(file: FileSum) -> str:
    return f"{file.size} bytes with CRC-32 {file.crc32:08x}"


def _sum(path: Path) -> FileSum:
    size = crc32 = 0
    chunk = memoryview(bytearray(READ_BYTES))
    # Read and not mapped into memory: where storage fails, an error can be caught and SIGBUS cannot.
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            size += count
            crc32 = zlib.crc32(chunk[:count], crc32)
    return FileSum(size, crc32)
