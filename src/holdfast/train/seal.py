"""Owns the seal of a checkpoint: the file that says what its folder must hold, and the check that it does.

Refuses to own what the files mean (checkpoint.py does).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast.errors import ExitCode, failure

FORMAT = 1
"""Of the folder as a whole; raised when an older holdfast could not read it."""
NAME = "seal.json"
READ_BYTES = 1 << 20


class FileSum(msgspec.Struct, frozen=True):
    """What a file must be found to be."""

    size: int
    crc32: int
    """Finds torn and flipped bytes at 7 GB/s here, where SHA-256 does 2; it is no defence against people."""


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """Written last: its presence under the final name says that the checkpoint is complete."""

    format: int = FORMAT
    step: int
    world_size: int
    samples: int | None = None
    """Samples that the steps so far have taken; none where the training does not tell."""
    files: dict[str, FileSum]


def sums(files: Iterable[Path]) -> dict[str, FileSum]:
    """What these files are now, by name."""
    return {file.name: _sum(file) for file in files}


def write(folder: Path, seal: Seal) -> None:
    """Seal a folder whose files are on disk already; the seal, too, is on disk when this returns."""
    with (folder / NAME).open("wb") as file:
        file.write(msgspec.json.encode(seal))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def verified(folder: Path) -> Seal | str:
    """The seal of a folder that is what it says, or the damage; one of a later format is not passed over in silence."""
    try:
        seal = msgspec.json.decode((folder / NAME).read_bytes(), type=Seal)
    except (OSError, msgspec.DecodeError) as error:
        return f"{NAME}: {error}"
    if seal.format > FORMAT:
        raise failure(
            "checkpoint-from-later-version",
            f"the newest checkpoint has format {seal.format}; this holdfast reads up to {FORMAT}",
            exit_code=ExitCode.IMPOSSIBLE,
            where=str(folder),
            remedy="upgrade holdfast, or set `checkpoint.path` in the job to another folder",
        )
    return _damage(folder, seal) or seal


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _damage(folder: Path, seal: Seal) -> str | None:
    for name, sealed in seal.files.items():
        try:
            found = _sum(folder / name)
        except OSError as error:
            return f"{name}: {error}"
        if found != sealed:
            return f"{name}: sealed as {_words(sealed)}, found to be {_words(found)}"
    return None


def _words(file: FileSum) -> str:
    return f"{file.size} bytes with CRC-32 {file.crc32:08x}"


def _sum(path: Path) -> FileSum:
    size = crc32 = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(READ_BYTES):
            size += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileSum(size, crc32)
