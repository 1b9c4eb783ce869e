"""Token cache on a node's disk: the first rank builds it, then all ranks map it into memory.

Every rank verifies the whole cache before training, so that damage is found before the first step; a truncated or
damaged cache is rebuilt, with a finding. Verifying each block on first read would cost nothing at start, but would find
damage in the middle of a step, after some ranks have trained on the same file.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding, Owner, Severity
from holdfast.host.files import open_lock
from holdfast.train.checkpoint.digested_json import digest_mismatch, with_digest
from holdfast.train.checkpoint.regular_file import is_damage, open_regular
from holdfast.train.data.tokenizers import Tokens

FORMAT = 2
BLOCK_BYTES = 64 << 20
"""Bytes of the file covered by one checksum."""
READ_BYTES = 1 << 18
"""Small enough to stay in a core's cache between the read and the checksum."""
READERS = min(4, len(os.sched_getaffinity(0)))
"""Threads that verify a file: each sums 4 GB/s here, and reads 3 GB/s from the page cache."""


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a token file."""

    count: int
    tokens_digest: str
    """Digest of all its tokens."""
    block_bytes: int
    crc32: list[int]
    """CRC-32 of each block."""


class CachedTokens(NamedTuple):
    """Tokens, and findings about their cache."""

    tokens: Tokens
    digest: str
    findings: tuple[Finding, ...] = ()


def default_cache_folder() -> Path:
    """Default folder of the token cache, under the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast" / "text"


def load_or_build(folder: Path, key: str, dtype: type[np.generic], parts: Iterable[Tokens]) -> CachedTokens:
    """The cached tokens of `key`; tokenises `parts` if the cache is missing or damaged."""
    name = blake2b(f"{FORMAT} {np.dtype(dtype).name} {key}".encode(), digest_size=16).hexdigest()
    findings: tuple[Finding, ...] = ()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_lock(folder / f"{name}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)  # ranks of one node check at the same time
            kept = _load(folder / name, dtype)
            if not isinstance(kept, CacheEntry):
                # NFS emulates flock by byte-range locks: two ranks that upgrade a shared lock deadlock.
                fcntl.flock(lock, fcntl.LOCK_UN)
                fcntl.flock(lock, fcntl.LOCK_EX)
                kept = _load(folder / name, dtype)  # another rank may have built it meanwhile
            if not isinstance(kept, CacheEntry):
                findings = (_damaged(folder / name, kept),) if kept else ()
                kept = _write(folder / name, parts)
    except OSError as error:
        raise failure(
            "data-cache-unwritable",
            "the tokens of the text cannot be kept",
            exit_code=ExitCode.STORAGE_FAILED,
            where=str(folder),
            evidence=(str(error),),
            remedy="give a folder that can be written and has room: Text(..., cache=...)",
            owner=Owner.CLUSTER,
        ) from error
    if kept.count == 0:
        return CachedTokens(np.array([], dtype=dtype), kept.tokens_digest, findings)
    return CachedTokens(np.memmap(folder / f"{name}.tokens", dtype=dtype, mode="r"), kept.tokens_digest, findings)


def _load(path: Path, dtype: type[np.generic]) -> CacheEntry | str | None:
    """The entry at `path` if it is intact; otherwise a description of the damage, or None if there is no entry."""
    known, tokens = path.with_suffix(".json"), path.with_suffix(".tokens")
    try:
        with open_regular(known) as file:
            content = file.readall()
    except FileNotFoundError:
        return None
    except OSError as error:
        return _damage(known, error)
    if (why := digest_mismatch(content)) is not None:
        return f"{known.name}: {why}"
    kept = msgspec.json.decode(content, type=CacheEntry)
    try:
        found = _block_checksums(tokens, kept.count * np.dtype(dtype).itemsize, kept.block_bytes)
    except OSError as error:
        return _damage(tokens, error)
    if isinstance(found, str):
        return f"{tokens.name}: {found}"
    bad = [number for number, (was, now) in enumerate(zip(kept.crc32, found, strict=True)) if was != now]
    if bad:
        first = bad[0]
        return (
            f"{tokens.name}: {len(bad)} of {len(found)} blocks of {kept.block_bytes:,} bytes are damaged; that at byte "
            f"{first * kept.block_bytes:,} has CRC-32 {found[first]:08x} and not {kept.crc32[first]:08x}"
        )
    return kept


def _damage(path: Path, error: OSError) -> str:
    if not is_damage(error):
        raise error
    return f"{path.name}: {error}"


def _block_checksums(path: Path, size: int, block_bytes: int) -> list[int] | str:
    """The checksums of a file's blocks, or a message that its size differs."""
    with open_regular(path) as file:
        if (there := os.fstat(file.fileno()).st_size) != size:
            return f"{there:,} bytes and not {size:,}"

        def summed(begin: int) -> int:
            crc32, place, end = 0, begin, min(begin + block_bytes, size)
            chunk = memoryview(bytearray(READ_BYTES))
            while place < end and (count := os.preadv(file.fileno(), [chunk[: end - place]], place)):
                crc32 = zlib.crc32(chunk[:count], crc32)
                place += count
            return crc32

        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(summed, range(0, size, block_bytes)))


def _write(path: Path, parts: Iterable[Tokens]) -> CacheEntry:
    digest, count, size = blake2b(digest_size=16), 0, 0
    crc32: list[int] = []
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for part in parts:
            raw: Any = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            file.write(raw)
            digest.update(raw)
            count += len(part)
            while len(raw):
                if size % BLOCK_BYTES == 0:
                    crc32.append(0)
                fits, raw = raw[: (room := BLOCK_BYTES - size % BLOCK_BYTES)], raw[room:]
                crc32[-1] = zlib.crc32(fits, crc32[-1])
                size += len(fits)
    kept = CacheEntry(count=count, tokens_digest=digest.hexdigest(), block_bytes=BLOCK_BYTES, crc32=crc32)
    partial.rename(path.with_suffix(".tokens"))
    entry_file = path.with_suffix(".json.partial")
    entry_file.write_bytes(with_digest(msgspec.json.encode(kept)))
    entry_file.rename(path.with_suffix(".json"))
    return kept


def _damaged(path: Path, damage: str) -> Finding:
    return Finding(
        code="data-cache-corrupt",
        severity=Severity.WARNING,
        what="the token cache on this node was damaged; it was rebuilt",
        where=str(path.with_suffix(".tokens")),
        evidence=(damage,),
        remedy="Nothing for this training, which has not read them. Check the node's disk and memory.",
        owner=Owner.CLUSTER,
    )
