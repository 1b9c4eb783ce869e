"""Owns the state of a rank on its way from one process to the next, in memory of their node that their agent holds.

The process that leaves writes all that it has of the training as it lies, its own part of what is sharded; the process
in its place, of the same rank among as many, copies it out and leaves it there. The head is written last and says what
every piece sums up to, and a state is only gone on from when all ranks hold the same step of the same attempt: what was
handed over by half is as if it were not there. Refuses to own when that is done (session.py), and who holds the memory
and for how long (agent/state_memory.py).
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from holdfast.findings import Finding, Owner, Severity
from holdfast.host.memory_usage import memory_usages
from holdfast.train.checkpoint import pytree
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.pytree import COPY_THREADS, is_plain, local_part
from holdfast.train.checkpoint.writer_fence import WriterId

MAGIC = b"holdfst1"
_HEAD = struct.Struct("<8sQQI")
"""What it is, where its index begins, how long that is, and what it sums up to."""
FIRST_BYTE = 64
"""Where the first tensor lies, after the head."""
MEMORY = "the nodes' memory"
"""Where a state was, in words."""


class StateMismatch(Exception):
    """What was handed over is of another model or optimiser; the text says where they part."""


class _TensorEntry(NamedTuple):
    """A tensor, where it lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    bytes: int
    crc32: int


class SnapshotHeader(NamedTuple):
    """What tells that a state is whole: its index's place and sum."""

    begin: int
    length: int
    crc32: int


class _SnapshotIndex(NamedTuple):
    """All that was handed over but the tensors' bytes."""

    writer: WriterId
    rank: int
    manifest: Manifest
    tree: Any
    """The state, with pieces in place of tensors."""
    per_rank_state: bytes


def write(
    memory: Path, writer: WriterId, rank: int, manifest: Manifest, tensors: dict[str, Any], per_rank_state: bytes
) -> None:
    """Hand over this rank's state. Raises OSError, or RuntimeError of a device's."""
    sources = [local_part(tensor) for tensor in pytree.iter_tensors(tensors)]
    starts = pytree.offsets(sources, FIRST_BYTE)
    with open(memory, "r+b", buffering=0) as file:
        file.truncate(0)
        require_memory(starts[-1])
        file.truncate(starts[-1])
        with mmap.mmap(file.fileno(), starts[-1]) as room, ThreadPoolExecutor(COPY_THREADS) as pool:
            pieces = list(pool.map(_write_tensor, repeat(room), starts, sources))
    _write_index(
        memory, starts[-1], _SnapshotIndex(writer, rank, manifest, _to_entries(tensors, iter(pieces)), per_rank_state)
    )


def write_staged(
    memory: Path,
    room: mmap.mmap,
    writer: WriterId,
    rank: int,
    manifest: Manifest,
    staged: dict[str, Any],
    per_rank_state: bytes,
) -> SnapshotHeader:
    """The same of a state whose tensors lie there already, one behind the other from `FIRST_BYTE` on (staging.py)."""
    sources = [local_part(tensor) for tensor in pytree.iter_tensors(staged)]
    starts = pytree.offsets(sources, FIRST_BYTE)
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        sums = pool.map(_checksum, repeat(room), starts, (source.nbytes for source in sources))
        pieces = [
            _TensorEntry(tuple(source.shape), source.dtype, start, source.nbytes, crc32)
            for source, start, crc32 in zip(sources, starts, sums, strict=False)
        ]
    return _write_index(
        memory, starts[-1], _SnapshotIndex(writer, rank, manifest, _to_entries(staged, iter(pieces)), per_rank_state)
    )


def _write_index(memory: Path, begin: int, index: _SnapshotIndex) -> SnapshotHeader:
    written = pickle.dumps(index)
    head = SnapshotHeader(begin, len(written), zlib.crc32(written))
    commit(memory, head, written)
    return head


def commit(memory: Path, head: SnapshotHeader, index: bytes | memoryview) -> None:
    """Have a state count whose tensors lie there: its index is written, and its head last."""
    with open(memory, "r+b", buffering=0) as file:
        file.truncate(head.begin)
        file.seek(head.begin)
        file.write(index)
        os.pwrite(file.fileno(), _HEAD.pack(MAGIC, *head), 0)


def invalidate(memory: Path) -> None:
    """Have what lies there count no more; the memory is kept."""
    with open(memory, "r+b", buffering=0) as file:
        if os.fstat(file.fileno()).st_size:
            file.write(bytes(_HEAD.size))


def read_index(memory: Path, head: SnapshotHeader) -> torch.Tensor:
    """The index of a state, as bytes."""
    with open(memory, "rb") as file:
        file.seek(head.begin)
        return torch.frombuffer(bytearray(file.read(head.length)), dtype=torch.uint8)


def tensor_bytes(room: mmap.mmap, head: SnapshotHeader) -> torch.Tensor:
    """The tensors of a state, where they lie, as bytes."""
    size = head.begin - FIRST_BYTE
    return torch.frombuffer(room, dtype=torch.uint8, offset=FIRST_BYTE, count=size) if size else torch.empty(0)


class SnapshotId(NamedTuple):
    """Whose state it is, and of when: equal on all ranks that can go on from it together."""

    writer: WriterId
    step: int
    world_size: int


RankSnapshot = tuple[SnapshotId, int, str | None]
"""What a rank says of what it has: its origin, its bytes, and its damage."""


def validate_all_ranks(parts: Sequence[RankSnapshot | None]) -> tuple[Finding | None, bool]:
    """What is to be said of what all ranks have, by rank, and whether they can go on from it; on rank 0."""
    found = [part for part in parts if part is not None]
    if not found:
        return None, False
    bad = [f"rank {rank} has none" for rank, part in enumerate(parts) if part is None]
    bad += [f"rank {rank}: {part[2]}" for rank, part in enumerate(parts) if part is not None and part[2]]
    if not bad and len({part[0] for part in found}) > 1:
        bad = [
            f"rank {rank} has step {part[0].step} of attempt {part[0].writer.attempt}"
            for rank, part in enumerate(found)
        ]
    if not bad and found[0][0].world_size != len(parts):
        bad = [f"{found[0][0].world_size} ranks handed it over, and these are {len(parts)}"]
    if bad:
        return _transfer_refused(bad), False
    step, size = found[0][0].step, sum(part[1] for part in found)
    return Finding(
        code="state-transfer-done",
        severity=Severity.INFO,
        what=f"the ranks go on after step {step} from {size:,} bytes that those before them left in {MEMORY}",
        where=MEMORY,
        remedy="Nothing: it was what it summed up to when it was written.",
    ), True


def _transfer_refused(evidence: Sequence[str]) -> Finding:
    return Finding(
        code="state-transfer-refused",
        severity=Severity.WARNING,
        what="what ranks left in their nodes' memory is not whole, so the newest checkpoint is gone on from",
        where=MEMORY,
        evidence=tuple(evidence[:8]),
        remedy="Nothing, if a node was lost meanwhile: what it had in memory went with it.",
        owner=Owner.CLUSTER,
    )


def transfer_failed(who: str, why: str) -> Finding:
    """Why a rank could not leave its state in memory."""
    return Finding(
        code="state-transfer-failed",
        severity=Severity.WARNING,
        what="the state could not be left in the nodes' memory, so a checkpoint is taken",
        where=who,
        evidence=(why,),
        remedy="Nothing: the ranks go on from the checkpoint. A hand-over needs room for a rank's state on its node.",
        owner=Owner.CLUSTER,
    )


class MemorySnapshot:
    """What was handed over to this rank, whole as far as its index, which says what the pieces sum up to."""

    def __init__(self, memory: Path, index: _SnapshotIndex, head: SnapshotHeader) -> None:
        self.memory = memory
        self.head = head
        self._index = index
        self.rank = index.rank
        self.bytes = head.begin + head.length
        self.manifest = index.manifest
        self.snapshot_id = SnapshotId(index.writer, index.manifest.step, index.manifest.world_size)

    @classmethod
    def find_for_rank(cls, memory: Path, *, rank: int) -> MemorySnapshot | None:
        """What lies there for this rank; None where there is nothing, or what was not finished."""
        found = cls.load(memory)
        return found if found is not None and found.rank == rank else None

    @classmethod
    def load(cls, memory: Path) -> MemorySnapshot | None:
        """What lies there, whichever rank's; None likewise."""
        try:
            with open(memory, "rb") as file:
                magic, *words = _HEAD.unpack(file.read(_HEAD.size))
                if magic != MAGIC:
                    return None
                head = SnapshotHeader(*words)
                if head.begin + head.length > os.fstat(file.fileno()).st_size:
                    return None
                file.seek(head.begin)
                written = file.read(head.length)
        except (OSError, struct.error):
            return None
        if len(written) != head.length or zlib.crc32(written) != head.crc32:
            return None
        return cls(memory, pickle.loads(written), head)

    def per_rank_state(self) -> io.BytesIO:
        """The rank's own part: random numbers, schedule, data, and what is the user's."""
        return io.BytesIO(self._index.per_rank_state)

    def find_damage(self) -> str | None:
        """How a piece differs from what was written."""
        with open(self.memory, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as room:
            pieces = list(_entries(self._index.tree))
            with ThreadPoolExecutor(COPY_THREADS) as pool:
                sums = list(
                    pool.map(_checksum, repeat(room), (each.start for each in pieces), (each.bytes for each in pieces))
                )
        for piece, found in zip(pieces, sums, strict=True):
            if found != piece.crc32:
                return f"{piece.bytes} bytes in memory have CRC-32 {found:08x} and not {piece.crc32:08x}"
        return None

    def copy_into(self, state: dict[str, Any]) -> None:
        """Put what was handed over into a state of the same shape; raises Unfit."""
        with open(self.memory, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as room:
            whole = torch.frombuffer(room, dtype=torch.uint8)
            _copy_into(state, self._index.tree, whole, "")
            del whole  # it keeps the mapping open


def require_memory(size: int, root: Path = Path("/")) -> None:
    """Memory that is not there is not asked for: the kernel would end a process, and say nothing before."""
    tightest = min(memory_usages(root), key=lambda one: one.free_bytes)
    if tightest.free_bytes < size:
        raise OSError(f"{size:,} bytes of memory are not there: {tightest.where} has {tightest.free_bytes:,} left")


def _write_tensor(room: mmap.mmap, start: int, source: torch.Tensor) -> _TensorEntry:
    shape, dtype, size = tuple(source.shape), source.dtype, source.nbytes
    if size:
        into = torch.frombuffer(room, dtype=torch.uint8, count=size, offset=start)
        with torch.no_grad():
            into.view(dtype).view(shape).copy_(source)
        del into
    return _TensorEntry(shape, dtype, start, size, _checksum(room, start, size))


def _checksum(room: mmap.mmap, start: int, size: int) -> int:
    with memoryview(room) as view, view[start : start + size] as part:
        return zlib.crc32(part)


def _to_entries(tree: object, pieces: Iterator[_TensorEntry]) -> object:
    """The tree with pieces in place of its tensors, in the order of `trees.tensors`."""
    if isinstance(tree, dict):
        return {key: _to_entries(value, pieces) for key, value in cast("dict[object, object]", tree).items()}
    if isinstance(tree, list | tuple):
        return [_to_entries(value, pieces) for value in cast("Sequence[object]", tree)]
    return next(pieces) if is_plain(tree) else tree


def _entries(tree: object) -> Iterator[_TensorEntry]:
    if isinstance(tree, _TensorEntry):
        yield tree
    elif isinstance(tree, dict):
        for value in cast("dict[object, object]", tree).values():
            yield from _entries(value)
    elif isinstance(tree, list):
        for value in cast("list[object]", tree):
            yield from _entries(value)


def _copy_into(own: Any, entry: Any, whole: torch.Tensor, where: str) -> Any:
    """What a place in the state is to hold: its own tensor with what was handed over in it, or what was there."""
    if isinstance(own, dict) and isinstance(entry, dict):
        mine, theirs = cast("dict[Any, Any]", own), cast("dict[Any, Any]", entry)
        for key in mine:
            if key not in theirs:
                raise StateMismatch(f"{where}{key} was not handed over")
            mine[key] = _copy_into(mine[key], theirs[key], whole, f"{where}{key}.")
        return mine
    if isinstance(own, list) and isinstance(entry, list):
        mine, theirs = cast("list[Any]", own), cast("list[Any]", entry)
        if len(mine) != len(theirs):
            raise StateMismatch(f"{where[:-1]} has {len(mine)} parts, and had {len(theirs)}")
        mine[:] = [_copy_into(*pair, whole, f"{where}{at}.") for at, pair in enumerate(zip(mine, theirs, strict=True))]
        return mine
    if not isinstance(entry, _TensorEntry):
        return entry
    source = _tensor_at(whole, entry)
    if not isinstance(own, torch.Tensor):
        return source.clone()
    into = local_part(own)
    if tuple(into.shape) != entry.shape:
        raise StateMismatch(f"{where[:-1]} is of shape {tuple(into.shape)}, and was of {entry.shape}")
    with torch.no_grad():
        into.copy_(source)
    return own


def _tensor_at(whole: torch.Tensor, piece: _TensorEntry) -> torch.Tensor:
    if not piece.bytes:
        return torch.empty(piece.shape, dtype=piece.dtype)
    return whole[piece.start : piece.start + piece.bytes].view(piece.dtype).view(piece.shape)
