"""Owns the seal of a checkpoint: the file that says what its folder must hold, and the check that it does.

From format 2 on the seal ends with a digest of all that stands before it: so that a damaged one is never taken for one
that another version wrote. Refuses to own what the files mean (checkpoint.py does).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import msgspec

from holdfast.errors import ExitCode, failure
from holdfast.train.configured import Configured
from holdfast.train.environment import ELSEWHERE
from holdfast.train.regular import open_regular
from holdfast.train.signed import is_signed, mismatch, signed

FORMAT = 2
"""Of the folder as a whole; raised when an older holdfast could not read it."""
NAME = "seal.json"
MAX_BYTES = 64 << 20
"""Of a seal; it has about 80 for each file, and two files for each rank."""
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


def read(folder: Path, step: int) -> Seal | str:
    """The seal of a folder that is named after this step, of whatever format, or the damage to it."""
    try:
        with open_regular(folder / NAME) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
                return f"{NAME}: {size:,} bytes, and no seal has more than {MAX_BYTES:,}"
            content = file.readall()
    except OSError as error:
        return f"{NAME}: {error}"
    return decoded(content, step)


def encoded(seal: Seal) -> bytes:
    """A seal as its file holds it: a JSON object whose last field is the digest of what stands before."""
    return signed(msgspec.json.encode(seal))


def decoded(content: bytes, step: int) -> Seal | str:
    """What the seal's file of a checkpoint of this step holds, or the damage to it."""
    if (why := mismatch(content)) is not None:
        return _of_earlier_version(content, step) or f"{NAME}: {why}"
    try:
        seal = msgspec.json.decode(content, type=Seal)
    except msgspec.DecodeError as error:
        return _of_later_version(content, step) or f"{NAME}: {error}"
    if seal.format <= FORMAT and seal.step != step:
        return f"{NAME}: of step {seal.step}, in the folder of step {step}"
    return seal


def refuse_other_format(sealed: Seal, where: str) -> None:
    """Raise where only another version can read it: to resume from an older one would undo steps unasked."""
    if sealed.format > FORMAT:
        raise failure(
            "checkpoint-from-later-version",
            f"the newest checkpoint has format {sealed.format}; this holdfast reads up to {FORMAT}",
            exit_code=ExitCode.IMPOSSIBLE,
            where=where,
            remedy=f"upgrade holdfast, or {ELSEWHERE}",
        )
    if sealed.format < FORMAT:
        raise failure(
            "checkpoint-from-earlier-version",
            f"the newest checkpoint has format {sealed.format}; this holdfast reads format {FORMAT} only",
            exit_code=ExitCode.IMPOSSIBLE,
            where=where,
            remedy=f"finish this training with the holdfast that wrote it, or {ELSEWHERE}",
        )


def _of_earlier_version(content: bytes, step: int) -> Seal | None:
    """One of format 1, which had no digest: only a whole one without any, so that a damaged later one is none."""
    if is_signed(content):
        return None
    try:
        seal = msgspec.json.decode(content, type=Seal)
    except msgspec.DecodeError:
        return None
    return seal if seal.format == 1 and seal.step == step else None


def _of_later_version(content: bytes, step: int) -> Seal | None:
    """One that says that it is, whatever else it says: it may say all of it otherwise."""
    try:
        version = msgspec.json.decode(content, type=_Version)
    except msgspec.DecodeError:
        return None
    return Seal(format=version.format, step=step, world_size=0, files={}) if version.format > FORMAT else None


def damage(file: Path, sealed: FileSum) -> str | None:
    """How a file differs from what it was sealed as; None where it does not."""
    try:
        size, found = _found(file, sealed.size)
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
    # Read and not mapped into memory: where storage fails, an error can be caught and SIGBUS cannot.
    with open_regular(path) as file:
        return _sum_of(file)


def _found(path: Path, size: int) -> tuple[int, FileSum | None]:
    """A file's size, and its sum if the size is this one."""
    with open_regular(path) as file:
        there = os.fstat(file.fileno()).st_size
        return there, _sum_of(file) if there == size else None


def _sum_of(file: FileIO) -> FileSum:
    size = crc32 = 0
    chunk = memoryview(bytearray(READ_BYTES))
    while count := file.readinto(chunk):
        size += count
        crc32 = zlib.crc32(chunk[:count], crc32)
    return FileSum(size, crc32)
