"""Owns the seal of a checkpoint: the file that says what its folder must hold, and the check that it does.

From format 2 on the seal ends with a digest of all that stands before it: so that a damaged one is never taken for one
that another version wrote. Refuses to own what the files mean (manager.py does).
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
from holdfast.train.checkpoint.digested_json import digest_mismatch, has_digest, with_digest
from holdfast.train.checkpoint.hyperparams import Hyperparams
from holdfast.train.checkpoint.regular_file import open_regular
from holdfast.train.session.rank_config import USE_ANOTHER_FOLDER

FORMAT = 2
"""Of the folder as a whole; raised when an older holdfast could not read it."""
NAME = "manifest.json"
MAX_BYTES = 64 << 20
"""Of a seal; it has about 80 for each file, and two files for each rank."""
READ_BYTES = 1 << 18
"""Little enough to stay in a core's own cache between being read and being summed."""


class FileChecksum(msgspec.Struct, frozen=True):
    """What a file must be found to be."""

    size: int
    crc32: int
    """Finds torn and flipped bytes at 4 GB/s here, where SHA-256 does 1; it is no defence against people."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last: its presence under the final name says that the checkpoint is complete."""

    format: int = FORMAT
    step: int
    world_size: int
    samples: int | None = None
    """Samples that the steps so far have taken; none where the training does not tell."""
    node_s: float = 0.0
    """Seconds of training so far, of all nodes together."""
    hyperparams: Hyperparams | None = None
    """What the program had set; none where it was not noted."""
    files: dict[str, FileChecksum]


class _Version(msgspec.Struct, frozen=True):
    """What every version of a seal says, now and later."""

    format: int


def checksums(files: Iterable[Path]) -> dict[str, FileChecksum]:
    """See these files to disk; returns what they are, by name. The disk works while the sums are made."""
    files = list(files)
    with ThreadPoolExecutor(max(1, 2 * len(files))) as pool:
        synced = [pool.submit(_sync, file) for file in files]
        summed = [pool.submit(_checksum, file) for file in files]
    for each in synced:
        each.result()
    return {file.name: each.result() for file, each in zip(files, summed, strict=True)}


def write(folder: Path, manifest: Manifest) -> None:
    """Seal a folder whose files are on disk already; the seal, too, is on disk when this returns."""
    with (folder / NAME).open("wb") as file:
        file.write(encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read(folder: Path, step: int) -> Manifest | str:
    """The seal of a folder that is named after this step, of whatever format, or the damage to it."""
    try:
        with open_regular(folder / NAME) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
                return f"{NAME}: {size:,} bytes, and no seal has more than {MAX_BYTES:,}"
            content = file.readall()
    except OSError as error:
        return f"{NAME}: {error}"
    return decode(content, step)


def encode(manifest: Manifest) -> bytes:
    """A seal as its file holds it: a JSON object whose last field is the digest of what stands before."""
    return with_digest(msgspec.json.encode(manifest))


def decode(content: bytes, step: int) -> Manifest | str:
    """What the seal's file of a checkpoint of this step holds, or the damage to it."""
    if (why := digest_mismatch(content)) is not None:
        return _decode_format_1(content, step) or f"{NAME}: {why}"
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        return _decode_later_format(content, step) or f"{NAME}: {error}"
    if manifest.format <= FORMAT and manifest.step != step:
        return f"{NAME}: of step {manifest.step}, in the folder of step {step}"
    return manifest


def refuse_other_format(manifest: Manifest, where: str) -> None:
    """Raise where only another version can read it: to resume from an older one would undo steps unasked."""
    if manifest.format > FORMAT:
        raise failure(
            "checkpoint-from-later-version",
            f"the newest checkpoint has format {manifest.format}; this holdfast reads up to {FORMAT}",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=where,
            remedy=f"upgrade holdfast, or {USE_ANOTHER_FOLDER}",
        )
    if manifest.format < FORMAT:
        raise failure(
            "checkpoint-from-earlier-version",
            f"the newest checkpoint has format {manifest.format}; this holdfast reads format {FORMAT} only",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=where,
            remedy=f"finish this training with the holdfast that wrote it, or {USE_ANOTHER_FOLDER}",
        )


def _decode_format_1(content: bytes, step: int) -> Manifest | None:
    """One of format 1, which had no digest: only a whole one without any, so that a damaged later one is none."""
    if has_digest(content):
        return None
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError:
        return None
    return manifest if manifest.format == 1 and manifest.step == step else None


def _decode_later_format(content: bytes, step: int) -> Manifest | None:
    """One that says that it is, whatever else it says: it may say all of it otherwise."""
    try:
        version = msgspec.json.decode(content, type=_Version)
    except msgspec.DecodeError:
        return None
    return Manifest(format=version.format, step=step, world_size=0, files={}) if version.format > FORMAT else None


def find_damage(file: Path, expected: FileChecksum) -> str | None:
    """How a file differs from what it was sealed as; None where it does not."""
    try:
        size, found = _checksum_if_size(file, expected.size)
    except FileNotFoundError:
        return f"{file.name}: sealed as {_shown(expected)}, and missing"
    except OSError as error:
        return f"{file.name}: {error}"
    if found == expected:
        return None
    return f"{file.name}: sealed as {_shown(expected)}, found to be {_shown(found) if found else f'{size} bytes'}"


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


def _shown(file: FileChecksum) -> str:
    return f"{file.size} bytes with CRC-32 {file.crc32:08x}"


def _checksum(path: Path) -> FileChecksum:
    # Read and not mapped into memory: where storage fails, an error can be caught and SIGBUS cannot.
    with open_regular(path) as file:
        return _checksum_of(file)


def _checksum_if_size(path: Path, size: int) -> tuple[int, FileChecksum | None]:
    """A file's size, and its sum if the size is this one."""
    with open_regular(path) as file:
        there = os.fstat(file.fileno()).st_size
        return there, _checksum_of(file) if there == size else None


def _checksum_of(file: FileIO) -> FileChecksum:
    size = crc32 = 0
    chunk = memoryview(bytearray(READ_BYTES))
    while count := file.readinto(chunk):
        size += count
        crc32 = zlib.crc32(chunk[:count], crc32)
    return FileChecksum(size, crc32)
