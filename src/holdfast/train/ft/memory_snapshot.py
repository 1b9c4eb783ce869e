"""Transfers a rank's state to its successor process through node memory that the agent holds.

The exiting process writes its shard and per-rank state; its successor, the same rank in the same world size, copies it
out and leaves it there. The header is written last, with the checksum of the index. All ranks must hold the same step
of the same attempt, or no rank resumes from memory. When: session.py; who holds the memory and for how long:
agent/state_memory.py.
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
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from holdfast.findings import Finding, Owner, Severity
from holdfast.host.memory_usage import memory_usages
from holdfast.train.accelerator import bind_like_this_thread
from holdfast.train.checkpoint import pytree
from holdfast.train.checkpoint.deferred_pickle import IMMUTABLE_TYPES
from holdfast.train.checkpoint.hyperparams import Hyperparams
from holdfast.train.checkpoint.manifest_file import FileChecksum, Manifest
from holdfast.train.checkpoint.pytree import COPY_THREADS, is_plain
from holdfast.train.checkpoint.safe_state import Global, RestrictedUnpickler, globals_of, numpy_globals
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.torch_private import local_part

MAGIC = b"holdfst1"
_HEAD = struct.Struct("<8sQQI")
"""Magic, offset of the index, its length, and its checksum."""
FIRST_BYTE = 64
"""Offset of the first tensor, after the header."""
MEMORY = "the nodes' memory"
"""Name of the location in messages."""


class StateMismatch(Exception):
    """The snapshot is of another model or optimizer; the text names the first difference."""


class _TensorEntry(NamedTuple):
    """Location of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    bytes: int
    crc32: int


class SnapshotHeader(NamedTuple):
    """Marks a complete snapshot: location and checksum of its index."""

    begin: int
    length: int
    crc32: int


class _SnapshotIndex(NamedTuple):
    """Everything in a snapshot except the tensors' bytes."""

    writer: WriterId
    rank: int
    manifest: Manifest
    tree: Any
    """The state, with entries in place of tensors."""
    per_rank_state: bytes


def write(
    memory: Path, writer: WriterId, rank: int, manifest: Manifest, tensors: dict[str, Any], per_rank_state: bytes
) -> None:
    """Write this rank's snapshot. Raises OSError, or RuntimeError from a device."""
    sources = [local_part(tensor) for tensor in pytree.iter_tensors(tensors)]
    starts = pytree.offsets(sources, FIRST_BYTE)
    with open(memory, "r+b", buffering=0) as file:
        file.truncate(0)
        require_memory(starts[-1])
        file.truncate(starts[-1])
        copiers = ThreadPoolExecutor(COPY_THREADS, initializer=bind_like_this_thread())
        with mmap.mmap(file.fileno(), starts[-1]) as room, copiers as pool:
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
    """Write a snapshot whose tensors are already in place, consecutive from `FIRST_BYTE` (staging.py)."""
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
    # Read again by a restricted unpickler: `_index_types` names all that this contains.
    written = pickle.dumps(index)
    head = SnapshotHeader(begin, len(written), zlib.crc32(written))
    commit(memory, head, written)
    return head


def commit(memory: Path, head: SnapshotHeader, index: bytes | memoryview) -> None:
    """Commit a snapshot whose tensors are in place: writes the index, then the header."""
    with open(memory, "r+b", buffering=0) as file:
        file.truncate(head.begin)
        file.seek(head.begin)
        file.write(index)
        os.pwrite(file.fileno(), _HEAD.pack(MAGIC, *head), 0)


def invalidate(memory: Path) -> None:
    """Invalidate the snapshot, but keep the memory."""
    with open(memory, "r+b", buffering=0) as file:
        if os.fstat(file.fileno()).st_size:
            file.write(bytes(_HEAD.size))


def read_index(memory: Path, head: SnapshotHeader) -> torch.Tensor:
    """The index of a snapshot, as bytes."""
    with open(memory, "rb") as file:
        file.seek(head.begin)
        return torch.frombuffer(bytearray(file.read(head.length)), dtype=torch.uint8)


def tensor_bytes(room: mmap.mmap, head: SnapshotHeader) -> torch.Tensor:
    """The tensors of a snapshot in place, as bytes."""
    size = head.begin - FIRST_BYTE
    return torch.frombuffer(room, dtype=torch.uint8, offset=FIRST_BYTE, count=size) if size else torch.empty(0)


class SnapshotId(NamedTuple):
    """Source and step of a snapshot: equal on all ranks that can resume from it together."""

    writer: WriterId
    step: int
    world_size: int


RankSnapshot = tuple[SnapshotId, int, str | None]
"""A rank's report of its snapshot: its ID, its size in bytes, and its damage."""


def validate_all_ranks(parts: Sequence[RankSnapshot | None]) -> tuple[Finding | None, bool]:
    """The finding on all ranks' snapshots, by rank, and whether all ranks can resume from them; on rank 0."""
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
        what=f"the ranks resume after step {step} from {size:,} bytes that their predecessors left in {MEMORY}",
        where=MEMORY,
        remedy="Nothing: it was what it summed up to when it was written.",
    ), True


def _transfer_refused(evidence: Sequence[str]) -> Finding:
    return Finding(
        code="state-transfer-refused",
        severity=Severity.WARNING,
        what="the state in the nodes' memory is incomplete, so the ranks resume from the newest checkpoint",
        where=MEMORY,
        evidence=tuple(evidence[:8]),
        remedy="Nothing, if a node was lost meanwhile: what it had in memory went with it.",
        owner=Owner.CLUSTER,
    )


def transfer_failed(who: str, why: str) -> Finding:
    """Why a rank could not write its snapshot."""
    return Finding(
        code="state-transfer-failed",
        severity=Severity.WARNING,
        what="the state could not be left in the nodes' memory, so a checkpoint is taken",
        where=who,
        evidence=(why,),
        remedy="Nothing: the ranks resume from the checkpoint. A state transfer needs memory for each rank's state.",
        owner=Owner.CLUSTER,
    )


class MemorySnapshot:
    """A snapshot for this rank with a verified index, which has the checksums of the tensors."""

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
        """The snapshot for this rank; None if there is none or it is incomplete."""
        found = cls.load(memory)
        return found if found is not None and found.rank == rank else None

    @classmethod
    def load(cls, memory: Path) -> MemorySnapshot | None:
        """The snapshot of any rank; None if there is none or it is incomplete."""
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
        try:
            return cls(memory, RestrictedUnpickler(io.BytesIO(written), _index_types()).load(), head)
        except pickle.UnpicklingError:
            return None

    def per_rank_state(self) -> io.BytesIO:
        """The per-rank state: random state, schedule, data, and the user's own state."""
        return io.BytesIO(self._index.per_rank_state)

    def optimizer_state(self) -> set[str]:
        """Names of the parameters that were saved with optimizer state."""
        return {name for name, values in self._index.tree["optimizer"]["state"].items() if values}

    def find_damage(self) -> str | None:
        """How a tensor differs from what was written; None if all match."""
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
        """Copy the snapshot into a state of the same shape; raises StateMismatch."""
        with open(self.memory, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as room:
            whole = torch.frombuffer(room, dtype=torch.uint8)
            _copy_into(state, self._index.tree, whole, "")
            del whole  # it references the mapping


@cache
def _index_types() -> dict[Global, object]:
    """What an index is pickled with: it may come from another rank, and must not bring code."""
    rebuild = WriterId().__reduce__()[0]  # how msgspec's objects are unpickled
    types = (_SnapshotIndex, _TensorEntry, WriterId, Manifest, FileChecksum, Hyperparams, rebuild, *numpy_globals())
    return globals_of(types)


def require_memory(size: int, root: Path = Path("/")) -> None:
    """Raise if memory is short: allocating it would make the kernel kill a process without warning."""
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
    """The tree with entries in place of its tensors, in the order of `iter_tensors`, and lists of them for wrappers."""
    if isinstance(tree, dict):
        return {key: _to_entries(value, pieces) for key, value in cast("dict[object, object]", tree).items()}
    if isinstance(tree, list | tuple):
        return [_to_entries(value, pieces) for value in cast("Sequence[object]", tree)]
    if is_plain(tree):
        return next(pieces)
    if isinstance(tree, torch.Tensor) and (entries := [next(pieces) for _ in pytree.parts(tree)]):
        return entries
    if type(tree) not in IMMUTABLE_TYPES and type(tree).__module__ != "numpy":  # numpy's numbers
        raise RuntimeError(f"the state has a {type(tree).__name__}, which cannot be read from memory")
    return tree


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
    """New value for a slot of the state: its own tensor filled from the snapshot, or the snapshot's value."""
    if isinstance(own, dict) and isinstance(entry, dict):
        mine, theirs = cast("dict[Any, Any]", own), cast("dict[Any, Any]", entry)
        for key in mine:
            if key not in theirs:
                raise StateMismatch(f"{where}{key} was not transferred")
            mine[key] = _copy_into(mine[key], theirs[key], whole, f"{where}{key}.")
        return mine
    if isinstance(own, torch.Tensor) and isinstance(entry, list):
        _copy_into([*pytree.parts(own)], cast("list[Any]", entry), whole, where)
        return own
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
