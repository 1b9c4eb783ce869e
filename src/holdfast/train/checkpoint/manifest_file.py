"""Checkpoint manifest: lists the files of a folder with their checksums, and serves as its commit marker.

From format 2 on it ends with a digest of everything before it, so that a damaged manifest is never mistaken for one of
another version.
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
"""Version of the whole folder; increases when an older holdfast could not read it."""
NAME = "manifest.json"
MAX_BYTES = 64 << 20
"""Of a manifest, which takes about 80 bytes per file, with two files per rank."""
READ_BYTES = 1 << 18
"""Small enough to stay in a core's cache between the read and the checksum."""


class FileChecksum(msgspec.Struct, frozen=True):
    """Expected size and checksum of a file."""

    size: int
    crc32: int
    """Detects torn and flipped bytes at 4 GB/s here, where SHA-256 reaches 1 GB/s; no defence against tampering."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last: its presence under the final name marks the checkpoint as complete."""

    format: int = FORMAT
    step: int
    world_size: int
    samples: int | None = None
    """Samples of all steps so far; None if unknown."""
    node_s: float = 0.0
    """Seconds of training so far, summed over nodes."""
    hyperparams: Hyperparams | None = None
    """The program's settings; None if not recorded."""
    files: dict[str, FileChecksum]

    @property
    def size_bytes(self) -> int:
        """Bytes of its files, of all ranks."""
        return sum(each.size for each in self.files.values())


class _Version(msgspec.Struct, frozen=True):
    """Fields that every version of the manifest has, now and later."""

    format: int


def rank_file(rank: int) -> str:
    """Name of the file that holds a rank's own state."""
    return f"rank-{rank:05d}.pt"


def checksums(files: Iterable[Path]) -> dict[str, FileChecksum]:
    """Sync these files to disk and return their checksums by name; summing overlaps with the sync."""
    files = list(files)
    with ThreadPoolExecutor(max(1, 2 * len(files))) as pool:
        synced = [pool.submit(_sync, file) for file in files]
        summed = [pool.submit(_checksum, file) for file in files]
    for each in synced:
        each.result()
    return {file.name: each.result() for file, each in zip(files, summed, strict=True)}


def write(folder: Path, manifest: Manifest) -> None:
    """Write and sync the manifest of a folder whose files are already on disk."""
    with (folder / NAME).open("wb") as file:
        file.write(encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read(folder: Path, step: int) -> Manifest | str:
    """The manifest in the folder of this step, of any format, or a description of the damage."""
    try:
        with open_regular(folder / NAME) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
                return f"{NAME}: {size:,} bytes, and no manifest has more than {MAX_BYTES:,}"
            content = file.readall()
    except OSError as error:
        return f"{NAME}: {error}"
    return decode(content, step)


def encode(manifest: Manifest) -> bytes:
    """A manifest as bytes: a JSON object whose last field is the digest of everything before it."""
    return with_digest(msgspec.json.encode(manifest))


def decode(content: bytes, step: int) -> Manifest | str:
    """Parse the manifest of a checkpoint of this step, or describe the damage."""
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
    """Raise if only another version can read it: resuming from an older checkpoint would silently undo steps."""
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
    """Parse format 1, which had no digest; a digest in it means a damaged later format."""
    if has_digest(content):
        return None
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError:
        return None
    return manifest if manifest.format == 1 and manifest.step == step else None


def _decode_later_format(content: bytes, step: int) -> Manifest | None:
    """Parse a later format by its version field alone: the other fields may have changed."""
    try:
        version = msgspec.json.decode(content, type=_Version)
    except msgspec.DecodeError:
        return None
    return Manifest(format=version.format, step=step, world_size=0, files={}) if version.format > FORMAT else None


def find_damage(file: Path, expected: FileChecksum) -> str | None:
    """How a file differs from its manifest entry; None if it matches."""
    try:
        size, found = _checksum_if_size(file, expected.size)
    except FileNotFoundError:
        return f"{file.name}: expected {_shown(expected)}, and it is missing"
    except OSError as error:
        return f"{file.name}: {error}"
    if found == expected:
        return None
    return f"{file.name}: expected {_shown(expected)}, found {_shown(found) if found else f'{size} bytes'}"


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that its file names are on disk."""
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
    # Read, not mapped: if storage fails, a read raises an error that can be caught, and a mapping raises SIGBUS.
    with open_regular(path) as file:
        return _checksum_of(file)


def _checksum_if_size(path: Path, size: int) -> tuple[int, FileChecksum | None]:
    """A file's size, and its checksum if it has the expected size."""
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
